"""Talking to a served model: the client, the conversation, the terminal, the process."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_serve import THINKS, serving, with_template

from posttrain.base.errors import DataError, EngineError
from posttrain.cli import main
from posttrain.cli.serve import _answer
from posttrain.config import DataConfig, ModelConfig
from posttrain.data import prepare
from posttrain.models.load import load_tokenizer
from posttrain.serving import client, listening
from posttrain.serving.client import Client, ModelServer, ModelServers, Talk
from posttrain.serving.host import Host


@pytest.fixture(scope="module")
def stories(shared) -> Path:
    return shared / "models/stories260K"


@pytest.fixture(scope="module")
def url(stories):
    with serving(stories, template=None) as address:
        yield address


def test_a_conversation(url):
    talk = Talk(Client(url), {"temperature": 0, "max_tokens": 8})
    with pytest.raises(DataError, match="no question yet"):
        list(talk.again())
    first = list(talk.ask("Once upon a time"))
    assert len(first) > 3 and talk.turns[1] == {"role": "assistant", "content": "".join(first)}
    assert list(talk.again()) == first and len(talk.turns) == 2
    talk.change("temperature", "1.5")
    talk.change("seed", "3")
    assert list(talk.again()) != first
    talk.change("seed", "")
    assert talk.settings == {"temperature": 1.5, "max_tokens": 8}
    for name, value, message in (("heat", "1", "there is no setting heat"), ("top_k", "x", "give a number")):
        with pytest.raises(DataError, match=message):
            talk.change(name, value)
    talk.change("top_p", "7")
    with pytest.raises(DataError, match="top_p: Input should be less than or equal to 1"):
        list(talk.ask("and"))
    assert len(talk.turns) == 2, "a question that was refused is not in the conversation"
    talk.change("top_p", "")
    talk.change("max_tokens", "400")
    reply = talk.ask("A cat")
    part = next(reply)
    reply.close()
    assert talk.turns[-1] == {"role": "assistant", "content": part}, "a stopped reply stays as far as it came"
    talk.take_back()
    assert len(talk.turns) == 2
    talk.system = "Be brief."
    assert talk.prompt().endswith("Be brief." + "".join(turn["content"] for turn in talk.turns))


def test_commands_of_the_terminal(url, stories, capsys, tmp_path):
    talk = Talk(Client(url), {"temperature": 0, "max_tokens": 6})
    for line in (
        "Once upon a time",
        "/again",
        "/system Short.",
        "/set max_tokens 3",
        f"/save {tmp_path / 'talk.jsonl'}",
    ):
        _answer(talk, line)
    said = capsys.readouterr().out
    assert said.count(", there was") == 2 and "written: " in said
    assert talk.settings["max_tokens"] == 3
    tokenizer = load_tokenizer(ModelConfig(path=str(stories)))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    data = DataConfig(source=str(tmp_path / "talk.jsonl"), template="chat")
    assert len(prepare(data, tokenizer, "sft").train) == 1, "the file is training data"
    for line, message in (
        ("/dance", "there is no /dance"),
        ("/save", "give a file"),
        ("/save /no/such", "cannot write"),
    ):
        with pytest.raises(Exception, match=message):
            _answer(talk, line)
    _answer(talk, "/back")
    with pytest.raises(Exception, match="nothing to save"):
        _answer(talk, "/save x")


def test_chat_gives_its_server_the_variables_of_the_template(stories, tmp_path, monkeypatch, capsys):
    """From the flag of `chat` to that of `serve`, and from there into what the model reads."""
    served = []

    @contextmanager
    def in_this_process(model, options):
        with monkeypatch.context() as patch:
            patch.setattr(listening, "run", lambda start, app_of, socket, ready: (socket.close(), start()))
            patch.setattr(Host, "start", served.append)
            assert main(["serve", model, "--port", "0", *options]) == 0
        with serving(Path(model), template=served[-1].template, variables=served[-1].variables) as address:
            yield SimpleNamespace(client=Client(address))

    monkeypatch.setattr(client, "ModelServer", in_this_process)
    model = with_template(stories, tmp_path / "model", THINKS)
    for flags, end in (
        ([], "assistant:"),
        (["--chat-template-kwargs", "{enable_thinking: false}"], "assistant: (now)"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("/prompt\n"))
        assert main(["chat", str(model), "--terminal", *flags]) == 0
        assert capsys.readouterr().out.rstrip().endswith(end)


def test_what_a_model_says_is_inert(capsys):
    class Evil:
        def chat(self, turns, **settings):
            yield "\x1b[2J\x07red"

    _answer(Talk(Evil()), "hi")
    assert capsys.readouterr().out == "\\x1b[2J\\x07red\n"


def test_nobody_answers():
    with pytest.raises(EngineError, match="does not answer"):
        Client("http://127.0.0.1:9").rewards([])


@pytest.mark.slow
def test_the_command_starts_and_ends_a_server(stories, monkeypatch, capsys):
    """Questions from a pipe are answered; the server ends with the command, and when its parent is killed."""
    started: list[ModelServer] = []
    begin = ModelServer.__init__
    monkeypatch.setattr(ModelServer, "__init__", lambda self, *given: (started.append(self), begin(self, *given))[1])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n/quit\n"))
    assert main(["chat", str(stories), "--terminal", "--temperature", "0", "--max-tokens", "5"]) == 0
    assert ", there was" in capsys.readouterr().out
    assert not started[0].is_alive
    with pytest.raises(EngineError, match="no such folder"):
        ModelServers().client("/no/such/model")


@pytest.mark.slow
def test_a_server_ends_with_its_parent(stories):
    code = (
        "import sys, time\nfrom posttrain.serving.client import ModelServer\n"
        "server = ModelServer(sys.argv[1])\nprint(server._process.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(stories)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_json_of_the_interface_is_plain(url):
    """What a stream sends is one JSON object a line."""
    import httpx

    body = {"messages": [{"role": "user", "content": "Tim"}], "stream": True, "max_tokens": 3}
    lines = [line for line in httpx.post(f"{url}/v1/chat/completions", json=body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-1])
