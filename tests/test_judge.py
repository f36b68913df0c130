"""Judges behind a real HTTP server in this process, which answers, fails and hangs in every way that servers do."""

import itertools
import json
import math
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter, ValidationError
from test_online import train

from posttrain.base.errors import RewardError
from posttrain.cli import main
from posttrain.config.schema.judge import JudgeSettings, ScoreSettings
from posttrain.config.schema.rewards import JudgeReward, Reward
from posttrain.judges import client as client_module
from posttrain.judges import post
from posttrain.judges.judge import (
    JudgeInput,
    Pair,
    PairJudge,
    SingleJudge,
    filled,
    read_preference,
    read_score,
    summarise,
)
from posttrain.rewards.compose import RewardInput, Rewards
from posttrain.runs.metrics import read_metrics

KEY = "sk-very-secret-0123456789"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append((time.monotonic(), self.path, dict(self.headers), body))
            script = server.script.pop(0) if server.script else server.answer(body)
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        try:
            self.respond(script)
        except OSError:
            pass  # the client has left
        finally:
            with server.lock:
                server.open -= 1

    def respond(self, script):
        if isinstance(script, str):
            script = {"content": script}
        if script.get("sleep"):
            self.server.free.wait(script["sleep"])
        until = time.monotonic() + 5
        while self.server.most_open < script.get("together", 0) and time.monotonic() < until:
            time.sleep(0.005)
        if script.get("close"):
            return self.connection.close()
        data = script.get("body", completion(script.get("content", "[[5]]"))).encode()
        self.send_response(script.get("status", 200))
        for name, value in script.get("headers", {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) + script.get("missing", 0)))
        self.end_headers()
        for byte in data if script.get("drip") else ():
            self.wfile.write(bytes([byte]))
            if self.server.free.wait(script["drip"]):
                return None
        return None if script.get("drip") else self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def completion(content, prompt_tokens=7, completion_tokens=3):
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


@pytest.fixture
def server():
    """`script`: what the next requests get, in order; then `answer(body)`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.script, server.asked, server.answer = [], [], lambda body: "[[5]]"
    server.lock, server.free, server.open, server.most_open = threading.Lock(), threading.Event(), 0, 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.free.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client_module, "PAUSE_S", 0.01)


@pytest.fixture
def settings(server, tmp_path):
    """Makes settings for this server, with a cache of the test's own."""

    def make(cls=ScoreSettings, **more):
        url = f"http://127.0.0.1:{server.server_port}/v1"
        given = {"base_url": url, "model": "m", "timeout": 5, "retries": 2, "concurrency": 1}
        return cls(**(given | {"cache": str(tmp_path / "cache")} | more))

    return make


def one(settings, text="an answer", **more):
    with SingleJudge(settings) as judge:
        return judge([JudgeInput("a question", text, **more)])[0]


# --- a request ------------------------------------------------------------------------------------------------------


def test_a_request_is_what_the_settings_say(server, settings, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("MY_KEY", KEY)
    more = {"parameters": {"max_tokens": None, "seed": 3}, "api_key_env": "MY_KEY", "system_prompt": "be brief"}
    judged = one(settings(prompt="{prompt} {{completion}} {answer} {other}", **more), "{answer}", answer="7")
    (_, path, headers, body), *none = server.asked
    assert not none and path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a question {{answer}} 7 {other}"},
        ],
        "temperature": 0.0,
        "seed": 3,
    }
    assert (judged.verdict, judged.score, judged.extracted) == ("scored", pytest.approx(4 / 9), "[[5]]")
    assert (judged.requests, judged.prompt_tokens, judged.completion_tokens) == (1, 7, 3)
    assert KEY not in caplog.text
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_the_built_in_question(server, settings):
    """MT-Bench's form; a reference only where there is one; what a completion holds is not filled in again."""
    one(settings(), "{prompt} \ud800")
    one(settings(), "8", answer="9")
    plain, referenced = (asked[3]["messages"][1]["content"] for asked in server.asked)
    assert "[Question]\na question\n\n[Start of the answer]\n{prompt} \\ud800\n" in plain and "{" not in plain[:300]
    assert "reference" not in plain and "[Start of the reference answer]\n9\n[End" in referenced
    with SingleJudge(settings()) as judge:
        judge([JudgeInput([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "x")])
    assert "user: hi\n\nassistant: ho" in server.asked[-1][3]["messages"][1]["content"]


# --- failures -------------------------------------------------------------------------------------------------------

NEVER = {
    "500": ({"status": 500, "body": '{"error": {"message": "no room"}}'}, "crashed", "outage: HTTP 500: no room", 3),
    "429": ({"status": 429}, "crashed", "outage: HTTP 429", 3),
    "closed": ({"close": True}, "crashed", "outage: the connection failed", 3),
    "cut short": ({"missing": 10}, "crashed", "outage: the connection failed", 3),
    "not JSON": ({"body": "<html>welcome</html>"}, "crashed", "invalid: not a chat completion: <html>", 3),
    "another schema": ({"body": '{"choices": []}'}, "crashed", "invalid: not a chat completion", 3),
    "content of no text": ({"body": completion(5)}, "crashed", "invalid: not a chat completion", 3),
    "a wrong request": ({"status": 400, "body": "too long"}, "crashed", "refused: HTTP 400: too long", 1),
    "hangs": ({"sleep": 5}, "timeout", "timeout: no answer within 0.2 s", 3),
    "drips": ({"drip": 0.05}, "timeout", "timeout: no answer within 0.2 s", 3),
}


@pytest.mark.parametrize("name", NEVER)
def test_no_answer_is_no_verdict(server, settings, name, caplog):
    script, verdict, reason, requests = NEVER[name]
    server.answer = lambda body: script
    short = {"timeout": 0.2} if verdict == "timeout" else {}
    began = time.monotonic()
    judged = one(settings(**short))
    assert (judged.verdict, judged.score, judged.counts) == (verdict, None, False)
    assert judged.reason.startswith(reason) and judged.requests == requests == len(server.asked)
    assert time.monotonic() - began < 12, "three waits for the server take 15 s"
    assert "judge m: no verdict on 1 of 1 question" in caplog.text


@pytest.mark.parametrize("name", [name for name in NEVER if NEVER[name][3] > 1])
def test_the_next_try_may_succeed(server, settings, name):
    server.script = [NEVER[name][0]]
    judged = one(settings(timeout=0.2))
    assert (judged.verdict, judged.requests, judged.completion_tokens) == ("scored", 2, 3)


def test_nothing_listens(settings):
    judged = one(settings(base_url="http://127.0.0.1:9"))
    assert judged.verdict == "crashed" and "Connection refused" in judged.reason


def test_retry_after_is_obeyed(server, settings):
    server.script = [{"status": 429, "headers": {"Retry-After": "1"}}, {"status": 503, "headers": {"Retry-After": "0"}}]
    assert one(settings()).requests == 3
    first, second, third = (asked[0] for asked in server.asked)
    assert second - first >= 0.99 and third - second < 0.9
    server.script = [{"status": 429, "headers": {"Retry-After": "3600"}}]
    judged = one(settings(), "another")
    assert judged.requests == 1 and "asks to wait 3600 s, longer than timeout" in judged.reason


@pytest.mark.parametrize(("status", "text"), [(401, "the API key is refused"), (404, "no such address or model")])
def test_wrong_settings_end_the_run_at_once(server, settings, monkeypatch, status, text):
    """The server repeats the key in its message: ours does not. After a first answer it is an outage like any other."""
    monkeypatch.setenv("MY_KEY", KEY)
    refusal = {"status": status, "body": json.dumps({"error": {"message": f"bad {KEY}"}})}
    server.answer = lambda body: "[[10]]" if "\nfirst\n" in body["messages"][1]["content"] else refusal
    asked = [JudgeInput("q", str(number)) for number in range(20)]
    with SingleJudge(settings(api_key_env="MY_KEY", concurrency=4)) as judge:
        with pytest.raises(RewardError, match=text) as raised:
            judge(asked)
        assert KEY not in str(raised.value) and "bad ***" in str(raised.value)
        assert judge([JudgeInput("q", "first")])[0].score == 1
        assert judge([JudgeInput("q", "second")])[0].verdict == "crashed"


def test_a_key_that_is_missing(settings, monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(RewardError, match="set the environment variable NO_KEY"):
        SingleJudge(settings(api_key_env="NO_KEY"))


def test_a_judge_that_is_down_is_not_asked_again_for_every_completion(server, settings):
    """Four failures in a row, then the rest of the call fails at once; the next call tries again."""
    server.answer = lambda body: {"status": 500}
    with SingleJudge(settings(retries=1)) as judge:
        judged = judge([JudgeInput("q", str(number)) for number in range(50)])
        assert {one.verdict for one in judged} == {"crashed"} and len(server.asked) == 4 * 2
        assert judged[-1].reason == "outage: the judge is down" and judged[-1].requests == 0
        server.answer = lambda body: "[[1]]"
        assert judge([JudgeInput("q", "49")])[0].score == 0


def test_an_interrupt_ends_what_is_open(server, settings):
    """Ctrl-C while the judge hangs: the wait ends, the connections too, and the process is not kept."""
    server.answer = lambda body: {"sleep": 30}
    began = time.monotonic()
    with SingleJudge(settings(timeout=60, concurrency=4)) as judge:
        main = threading.main_thread().ident
        threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            judge([JudgeInput("q", str(number)) for number in range(8)])
    assert time.monotonic() - began < 20
    assert not [thread for thread in threading.enumerate() if thread.name == "posttrain-judge"]
    assert len(server.asked) == 4


@pytest.mark.parametrize("runs", [False, True])
def test_an_interrupt_while_a_thread_is_started(server, settings, monkeypatch, runs):
    """Ctrl-C is raised, not an error of joining a thread that has not started; one that has is ended too."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if runs:
            start(thread)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), SingleJudge(settings()) as judge, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        judge([JudgeInput("q", "a")])
    assert not [thread for thread in threading.enumerate() if thread.name == "posttrain-judge"]


# --- what is asked, and how often -----------------------------------------------------------------------------------


def test_nothing_is_asked_twice(server, settings):
    """Equal questions of one call are one request; a later judge, at another address, finds all replies on disk."""
    server.answer = lambda body: f"[[{len(body['messages'][-1]['content']) % 10 + 1}]]"
    texts = ["a", "bb", "a", "ccc"]
    with SingleJudge(settings(concurrency=4)) as judge:
        first = judge([JudgeInput("q", text) for text in texts])
    assert len(server.asked) == 3 and sum(one.prompt_tokens for one in first) == 21
    with SingleJudge(settings(base_url="http://127.0.0.1:9/other")) as judge:
        second = judge([JudgeInput("q", text) for text in texts])
    assert [one.score for one in second] == [one.score for one in first] and first[0].score == first[2].score
    assert all((one.requests, one.prompt_tokens) == (0, 0) for one in second) and len(server.asked) == 3
    one(settings(temperature=0.5))  # another request
    assert len(server.asked) == 4


def test_failures_are_asked_again_by_the_next_run(server, settings):
    server.script = [{"status": 500}] * 3
    assert one(settings()).verdict == "crashed"
    assert one(settings()).verdict == "scored"


def test_requests_overlap(server, settings):
    server.answer = lambda body: {"together": 8, "content": "[[3]]"}  # none is answered before eight are open
    with SingleJudge(settings(concurrency=8, timeout=20)) as judge:
        judged = judge([JudgeInput("q", str(number)) for number in range(16)])
    assert server.most_open == 8
    assert [one.score for one in judged] == [pytest.approx(2 / 9)] * 16


def test_limits_per_minute(server, settings, monkeypatch):
    """No period has more than the limit: of requests, and of tokens as the server counts them."""
    times, enter = [], post.Pace.enter

    def recorded(self, tokens, stop):
        entry = enter(self, tokens, stop)
        times.append(entry.when)
        return entry

    monkeypatch.setattr(post.Pace, "enter", recorded)
    monkeypatch.setattr(post, "PERIOD_S", 0.3)
    with SingleJudge(settings(concurrency=8, requests_per_minute=5)) as judge:
        judge([JudgeInput("q", str(number)) for number in range(12)])
    times.sort()
    assert len(times) == len(server.asked) == 12
    assert all(b - a >= 0.3 - 1e-6 for a, b in zip(times, times[5:], strict=False))
    server.asked.clear()
    monkeypatch.setattr(post, "PERIOD_S", 30.0)
    with SingleJudge(settings(tokens_per_minute=10_000, max_tokens=4000)) as judge:  # 2 by estimate, 1000 by count
        judge([JudgeInput("r", str(number)) for number in range(6)])
    assert server.asked[-1][0] - server.asked[0][0] < 15  # corrected by the first answers


def test_a_request_larger_than_the_limit_goes_alone(monkeypatch):
    monkeypatch.setattr(post, "PERIOD_S", 0.1)
    limits, stop = post.Pace(None, 10), threading.Event()
    began = time.monotonic()
    assert limits.enter(50, stop) and limits.enter(50, stop)
    assert time.monotonic() - began >= 0.1
    stop.set()
    assert limits.enter(50, stop) is None


def test_a_damaged_cache(server, settings, tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/judge.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(RewardError, match=r"judge\.sqlite cannot be used.*rename it"):
        SingleJudge(settings())
    with pytest.raises(RewardError, match="cannot be used"):
        SingleJudge(settings(cache=str(tmp_path / "cache/judge.sqlite/x")))


def test_a_full_disk_under_the_cache_loses_no_reply(server, settings, tmp_path, caplog):
    with SingleJudge(settings()) as judge:
        with closing(sqlite3.connect(tmp_path / "cache/judge.sqlite")) as other, other:
            other.execute("CREATE TRIGGER full BEFORE INSERT ON replies BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        assert [one.verdict for one in judge([JudgeInput("q", "a"), JudgeInput("q", "b")])] == ["scored"] * 2
    assert caplog.text.count("disk full") == 1


# --- replies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "text", "score"),
    [
        ({}, "At first [[3]], but then: [[7]]", 7),
        ({}, "<think>[[3]]</think> Rating: [[ 8.5 ]]", 8.5),
        ({}, "<think> [[3]]", None),
        ({}, "Rating: 7", None),
        ({}, "[[11]]", None),
        ({"read": "number"}, "I give it a 7/10.", 7),
        ({"read": "number"}, "none", None),
        ({"read": "json"}, 'so {"a": {"x": 1}} ```json\n{"score": 4, "why": "{"}``` {', 4),
        ({"read": "json", "field": "grade"}, '{"score": 4, "grade": "9"}', 9),
        ({"read": "json"}, '{"score": true}', None),
        ({"read": "json"}, '{"score": NaN}', None),
        ({"read": "json"}, "{" * 5000, None),
        ({"read": "regex", "pattern": r"S=(\S+)"}, "S=2 S=3", 3),
        ({"read": "regex", "pattern": r"S=(\S+)"}, "S=x", None),
        ({"read": "regex", "pattern": r"S(=\d)?"}, "S", None),
    ],
)
def test_scores_by_hand(settings, more, text, score):
    prompt = {} if not more else {"prompt": "{completion}"}
    assert read_score(text, settings(**more, **prompt)) == score


def test_templates_are_filled_once():
    for prompt, completion, answer in itertools.permutations(["{answer}", r"\1{prompt", "{completion}}"]):
        values = {"prompt": prompt, "completion": completion, "answer": answer}
        assert filled("{prompt}{x}{completion}{answer}", values) == prompt + "{x}" + completion + answer


def test_an_unreadable_reply_is_asked_about_once(server, settings):
    """In the same conversation; then it is no verdict. Both replies are stored, so that a rerun asks nothing."""
    server.script = ["Good.", "[[8]]", "Fine.", "Really fine."]
    with SingleJudge(settings(scale=False)) as judge:
        good, bad = judge([JudgeInput("q", "a")]) + judge([JudgeInput("q", "b")])
    assert (good.verdict, good.score, good.requests, good.prompt_tokens, good.extracted) == (
        "scored", 8, 2, 14, "Good.\n[[8]]"
    )  # fmt: skip
    assert [message["role"] for message in server.asked[1][3]["messages"]] == ["system", "user", "assistant", "user"]
    assert (bad.verdict, bad.score, bad.unreadable, bad.requests) == ("crashed", None, True, 2)
    assert "unreadable: no verdict in 'Really fine.'" in bad.reason
    assert one(settings(scale=False), "unseen").counts
    asked = len(server.asked)
    with SingleJudge(settings(scale=False)) as judge:
        again = judge([JudgeInput("q", "a"), JudgeInput("q", "b")])
    assert [one.score for one in again] == [8, None] and len(server.asked) == asked


# --- the reward -----------------------------------------------------------------------------------------------------


def test_the_reward(server, settings):
    """No verdict is no reward, and is counted; the others compute while the judge answers."""
    scores = {"good": "[[10]]", "bad": "[[1]]", "odd": "what?"}

    def answer(body):
        text = body["messages"][1]["content"]
        return next((reply for word, reply in scores.items() if f"\n{word}\n" in text), {"status": 500})

    server.answer = answer
    term = settings(JudgeReward, type="judge", weight=2.0, retries=0, strip_thinking=True)
    texts = ["good", "<think>hm</think>bad", "odd", "down"]
    with Rewards(
        [term, *TypeAdapter(tuple[Reward, ...]).validate_python([{"type": "length", "target": 1}])]
    ) as rewards:
        rewarded = rewards([RewardInput(text, tokens=[1], prompt="q") for text in texts])
        assert rewards.right(rewarded) == {} == rewards.accuracies(rewarded)
    assert rewarded.totals == (2.0, 0.0, None, None)
    metrics = rewarded.metrics()
    assert metrics["rewards/left_out"] == 2 and metrics["rewards/judge/mean"] == 0.5
    names = ("timeout", "crashed", "bad_gold", "unreadable", "requests", "prompt_tokens", "completion_tokens")
    assert [metrics[f"rewards/judge/{name}"] for name in names] == [0, 2, 0, 1, 5, 28, 12]


def test_a_reward_that_needs_an_answer(server, settings):
    term = settings(JudgeReward, type="judge", prompt="{completion} = {answer}?")
    with Rewards([term]) as rewards:
        rewarded = rewards([RewardInput("7", answer="7"), RewardInput("7")])
    assert rewarded.totals == (pytest.approx(4 / 9), None) and rewarded[1].parts[0].grade.verdict == "bad_gold"


def test_a_judge_works_while_other_rewards_compute(server, settings, tmp_path, monkeypatch):
    """Each waits for the other to be at work."""
    (tmp_path / "waiting_rewards.py").write_text(
        "from judge_meeting import both\ndef waits(completions):\n    both.wait(20)\n    return [0.0]\n"
    )
    both = threading.Barrier(2)
    monkeypatch.setitem(sys.modules, "judge_meeting", SimpleNamespace(both=both))
    monkeypatch.chdir(tmp_path)
    server.answer = lambda body: [both.wait(20), "[[10]]"][1]
    python = TypeAdapter(Reward).validate_python({"type": "python", "function": "waiting_rewards:waits"})
    with Rewards([settings(JudgeReward, type="judge", timeout=30), python]) as rewards:
        assert rewards([RewardInput("x")]).totals == (1.0,)


def test_a_run_survives_an_outage_and_regrades_free(server, settings, sums_home, tmp_path, capsys):
    """The judge is down in the second of three steps: that step trains nothing. Regrading with the judge gone finds the
    replies of the other steps on disk."""
    down = threading.Event()
    server.answer = lambda body: (
        {"status": 500} if down.is_set() else f"[[{len(body['messages'][-1]['content']) % 9 + 1}]]"
    )
    term = settings(JudgeReward, type="judge", retries=0, concurrency=4, prompt="{prompt}{completion}", read="rating")
    steps = iter((False, True, False))
    ask = Rewards.__call__

    def call(self, completions, state=None):
        (down.set if next(steps) else down.clear)()
        return ask(self, completions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rewards, "__call__", call)
        folder = train(
            sums_home, tmp_path / "runs", {}, rewards=[json.loads(term.model_dump_json())], training={"max_steps": 3}
        )
    lines = read_metrics(folder)
    assert [line["rewards/left_out"] for line in lines] == [0, 32, 0] and "loss" not in lines[1]
    assert lines[0]["rewards/judge/prompt_tokens"] > 0 and lines[1]["rewards/judge/crashed"] == 32
    asked = len(server.asked)
    flag = json.dumps({**json.loads(term.model_dump_json()), "base_url": "http://127.0.0.1:9"})
    capsys.readouterr()
    assert main(["regrade", str(folder), "--reward", flag]) == 0
    assert "0 of 64 advantages change sign" in capsys.readouterr().out and len(server.asked) == asked


def test_a_secret_of_the_settings_is_written_and_printed_nowhere(server, settings, sums_home, tmp_path, capsys):
    """Its name is a key of a mapping; it is in no file that a run and other commands write, and in no output."""
    secret, runs = "two plain words", tmp_path / "runs"
    server.answer = lambda body: f"[[{len(body['messages'][-1]['content']) % 9 + 1}]]"
    term = settings(
        JudgeReward, type="judge", prompt="{prompt}{completion}", read="rating", cache=str(runs / "cache"),
        parameters={"metadata": {"api_key": secret}},
    )  # fmt: skip
    given = json.loads(term.model_dump_json())
    folder = train(
        sums_home, runs, {}, rewards=[given], training={"max_steps": 1}, tracking={"report_to": ["tensorboard"]}
    )
    assert all(body["metadata"] == {"api_key": secret} for _, _, _, body in server.asked)
    flag, rewards = json.dumps(given), json.dumps([given])
    more = ["name=s", f"output_dir={runs}", "data.validation={rows: 4}", "evaluation.eval_steps=1"]
    for arguments in (
        ["report", str(folder)], ["runs", "show", str(folder)], ["regrade", str(folder), "--reward", flag],
        ["config", "show", str(folder / "config.yaml"), f"rewards={rewards}"],
        ["sweep", str(folder / "config.yaml"), f"rewards={rewards}", "seed=0..1", *more],
        ["export", str(folder), "--output", str(runs / "out")],
    ):  # fmt: skip
        assert main(arguments) == 0, arguments
    said = capsys.readouterr()
    assert "api_key: '***'" in said.out and secret not in said.out + said.err
    files = [file for file in runs.rglob("*") if file.is_file() and file != runs / "config.json"]  # what it was given
    names = {file.name for file in files}
    assert {"sweep.json", "report.html", "README.md", "state.json", "training.log", "rollouts.sqlite"} <= names
    assert [file for file in files if secret.encode() in file.read_bytes()] == []
    capsys.readouterr()
    for swept in (f"rewards={rewards},[]", "hub.token=" + ",".join(f"hf_{letter * 34}" for letter in "ab")):
        assert main(["sweep", str(folder / "config.yaml"), swept]) == 2
        said = capsys.readouterr().err
        assert "a secret" in said and secret not in said and "aaaa" not in said


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url: must be http://HOST"),
        ({"base_url": "https://me:pw@host/v1"}, "without user, password"),
        ({"base_url": "http://host:port"}, "base_url: must be"),
        ({"api_key_env": KEY}, "not the key"),
        ({"prompt": "{prompt}"}, "must contain {completion}"),
        ({"read": "json"}, "prompt: is missing: the built-in prompt asks for"),
        ({"prompt": "{completion}", "read": "regex"}, "pattern: is missing"),
        ({"prompt": "{completion}", "read": "regex", "pattern": "(a"}, "with one group"),
        ({"pattern": "(a)"}, "needs read: regex, but read is"),
        ({"field": "x"}, "needs read: json, but read is"),
        ({"min_score": 10}, "must be above min_score, 10"),
        ({"parameters": {"stream": True}}, "must not have stream"),
    ],
)
def test_wrong_settings(settings, wrong, message):
    with pytest.raises(ValidationError) as raised:
        settings(JudgeReward, type="judge", **wrong)
    problems = raised.value.errors(include_input=False)[0]["ctx"]["error"]
    assert message in str(problems) and KEY not in str(problems)


# --- pairs ----------------------------------------------------------------------------------------------------------


def shown(body):
    """The two answers of a question about a pair, in the order of the question."""
    text = body["messages"][1]["content"]
    return [text.partition(f"assistant {name}'s answer]\n")[2].partition("\n")[0] for name in "AB"]


def longer(body):
    a, b = shown(body)
    return "[[C]]" if len(a) == len(b) else "[[A]]" if len(a) > len(b) else "[[B]]"


def test_a_fair_judge_of_pairs(server, settings):
    server.answer = longer
    with PairJudge(settings(JudgeSettings, concurrency=4)) as judge:
        found = judge.compare([Pair("q", "long", "s"), Pair("r", "s", "long"), Pair("q", "same", "case")])
    assert [one.result for one in found] == ["win", "loss", "tie"]
    assert [(one.a_first, one.b_first) for one in found] == [("a", "a"), ("b", "b"), ("tie", "tie")]
    summary = summarise(found)
    assert (summary.wins, summary.losses, summary.ties, summary.without_verdict) == (1, 1, 1, 0)
    assert (summary.win_rate, summary.agree, summary.first, summary.second, summary.bias_p) == (0.5, 3, 0, 0, 1.0)
    assert (summary.requests, summary.prompt_tokens, summary.completion_tokens) == (6, 42, 18)


def test_a_judge_that_favours_a_place_is_seen(server, settings):
    server.answer = lambda body: "[[A]]" if "0" not in "".join(shown(body)) else longer(body)
    with PairJudge(settings(JudgeSettings)) as judge:
        summary = summarise(judge.compare([Pair("q", f"{n}", f"{n} ") for n in range(8)]))
    assert (summary.wins, summary.losses, summary.ties, summary.agree, summary.first) == (0, 1, 7, 1, 7)
    assert summary.bias_p == pytest.approx(2 / 2**7) and summary.win_rate == 3.5 / 8


def test_a_pair_needs_both_orders(server, settings):
    server.script = ["[[A]]", {"status": 400}, "[[A]]", "[[C]]"]
    with PairJudge(settings(JudgeSettings)) as judge:
        lost, mixed = judge.compare([Pair("q", "x", "y"), Pair("q", "z", "w")])
    assert (lost.result, lost.a_first, lost.b_first) == (None, "a", None) and "HTTP 400" in lost.reason
    assert mixed.result == "tie" and (mixed.a_first, mixed.b_first) == ("a", "tie")
    summary = summarise([lost])
    assert summary.without_verdict == 1 and math.isnan(summary.win_rate)
    assert replace(summary, win_rate=0, without_verdict=0, requests=0, prompt_tokens=0, completion_tokens=0) == (
        type(summary)(0, 0, 0, 0, 0, 0, 0, 0, 1.0, 0, 0, 0)
    )
    assert read_preference("[[A]] no, [[B]]") == "B" and read_preference("[[D]]") is None
