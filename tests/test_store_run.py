"""The run folder: who may write there, what it tells, what it never tells, and how it reads after a resume."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

from posttrain.base.errors import DataError, RunError, Stopped
from posttrain.base.redaction import redact, redact_arguments
from posttrain.runs.checkpoint import list_checkpoints, newest_complete, saved_step
from posttrain.runs.checks import Finding
from posttrain.runs.finding import find_runs
from posttrain.runs.logs import ConsoleLog
from posttrain.runs.metrics import read_metrics
from posttrain.runs.run import Run
from posttrain.runs.summary import read_run

CONFIG = "name: toy\nmethod: {type: sft}\n"


def nothing(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


def facts(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


# Life of a run


def test_a_run_from_start_to_end(tmp_path):
    folder = tmp_path / "runs" / "toy"
    with Run.create(folder, CONFIG, {"seed": 3, "data": {"train": "ab12"}}) as run:
        assert facts(folder)["state"] == "running" and facts(folder)["ended"] is None
        run.log(1, {"loss": torch.tensor(0.5), "epoch": 0.25, "rewards/margins": 0.1})
        run.log(1, {"eval_loss": 0.75})
        run.save_checkpoint(1, nothing, limit=2)
        run.save_model(run.best, 1, nothing)
        run.set_counters({"dropped": 2})
        run.set_counters({"skipped": 0})
        run.write_results({"accuracy": 0.1 + 0.2})
        assert run.config_yaml == CONFIG
    first, second = read_metrics(folder)
    assert list(first) == ["step", "epoch", "time", "loss", "rewards/margins"]
    assert (first["step"], first["loss"], second["eval_loss"]) == (1, 0.5, 0.75)
    info = read_run(folder)
    assert (info.state, info.reason, info.metrics["eval_loss"]) == ("finished", None, 0.75)
    assert info.counters == {"dropped": 2, "skipped": 0}
    assert info.provenance["seed"] == 3 and info.provenance["data"] == {"train": "ab12"}
    assert info.provenance["versions"]["torch"] == version("torch")  # torch itself adds which build it is
    assert read_run(str(folder)).facts == info.facts and read_metrics(str(folder)) == read_metrics(folder)
    assert info.started <= info.ended
    assert json.loads((folder / "results.json").read_text()) == {"accuracy": 0.30000000000000004}
    assert saved_step(run.best) == 1 and list_checkpoints(run.folder) == [folder / "checkpoint-1"]
    assert find_runs(tmp_path / "runs") == [folder]


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (KeyboardInterrupt(), "interrupted", "stopped by Ctrl-C"),
        (Stopped(signal.SIGTERM), "interrupted", "stopped by SIGTERM"),
        (SystemExit(1), "failed", "sys.exit(1) was called (test_store_run.py line LINE)"),
        (DataError("row 3 is empty"), "failed", "row 3 is empty"),
        (ZeroDivisionError("oh"), "failed", "ZeroDivisionError: oh (test_store_run.py line LINE)"),
    ],
)
def test_how_a_run_ended_is_recorded(tmp_path, error, state, reason):
    with pytest.raises(type(error)), Run.create(tmp_path / "x", CONFIG, {}) as run:
        raise error
    assert error.__traceback__ is not None
    reason = reason.replace("LINE", str(error.__traceback__.tb_lineno))
    assert (read_run(run.folder).state, read_run(run.folder).reason) == (state, reason)
    log = (run.folder / "training.log").read_text()
    assert ("Traceback" in log) == isinstance(error, ZeroDivisionError | SystemExit) - isinstance(error, Stopped)
    assert (reason in log) == (state == "failed")


def test_a_state_set_by_hand_stays(tmp_path):
    with Run.create(tmp_path / "x", CONFIG, {}) as run:
        run.set_state("interrupted", "asked to")
    assert (read_run(run.folder).state, read_run(run.folder).reason) == ("interrupted", "asked to")


def test_a_handler_of_the_root_logger_does_not_print_messages_again(capfd, monkeypatch):
    """As a user's module makes one with logging.basicConfig, before the run or in the midst of it."""
    logger, root = logging.getLogger("posttrain"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    console = ConsoleLog()
    try:
        logging.basicConfig(level=logging.INFO)
        logger.info("once")
        logging.getLogger("theirs").info("of their own")
    finally:
        console.close()
    assert logger.propagate
    shown = capfd.readouterr().err
    assert shown.count("once") == 1 and "of their own" in shown


def test_messages_go_to_the_log_while_the_run_is_open(tmp_path, capsys, monkeypatch):
    logger = logging.getLogger("posttrain")
    monkeypatch.setattr(logger, "propagate", False)  # pytest's report of a parallel run cannot hold a lone surrogate
    console = ConsoleLog()
    try:
        with Run.create(tmp_path / "a", CONFIG, {}):
            logger.info("in a")
            logger.warning("odd \ud800 \x1b[31m text")
            logging.getLogger("posttrain.progress").info("step 1/2")
        with Run.create(tmp_path / "b", CONFIG, {}):
            logger.info("in b")
            logger.debug("too fine")
    finally:
        console.close()
        logger.removeHandler(console)
    a, b = ((tmp_path / name / "training.log").read_text() for name in "ab")
    assert "INFO in a\n" in a and "WARNING odd \\ud800 \\x1b[31m text\n" in a and "INFO step 1/2\n" in a
    assert "in b" not in a
    assert "INFO in b\n" in b and "too fine" not in b
    shown = capsys.readouterr().err
    assert "in a\n" in shown and "warning: odd \\ud800 \\x1b[31m text" in shown and "step 1/2" not in shown


# Who may write there


def test_an_occupied_folder_is_refused_and_untouched(tmp_path):
    folder = tmp_path / "x"
    with Run.create(folder, CONFIG, {}) as run:
        run.log(1, {"loss": 1.0})
        run.save_checkpoint(1, nothing, limit=None)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"has a run already: .*--resume.*--overwrite.*another name"):
        Run.create(folder, CONFIG, {})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    with Run.create(folder, "name: new\n", {}, overwrite=True) as run:
        assert read_metrics(folder) == [] == list_checkpoints(folder) and run.config_yaml == "name: new\n"


def test_overwrite_deletes_nothing_but_a_run(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(RunError, match="not a run folder"):
        Run.create(tmp_path / "thesis", CONFIG, {}, overwrite=True)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]
    for nest in ("group/a", "group/b"):
        Run.create(tmp_path / nest, CONFIG, {}).close()
    with pytest.raises(RunError, match=r"contains other runs \(a, b\)"):
        Run.create(tmp_path / "group", CONFIG, {}, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        Run.create(tmp_path / "file", CONFIG, {}, overwrite=True)
    (tmp_path / "empty").mkdir()
    Run.create(tmp_path / "empty", CONFIG, {}).close()


HOLD = """
import sys, time
from pathlib import Path
from posttrain.base.redaction import redact, redact_arguments
from posttrain.runs.run import Run
with Run.create(Path(sys.argv[1]), "name: x", {}) as run:
    run.log(1, {"loss": 1.0})
    print("ready", flush=True)
    time.sleep(60)
"""


def test_two_processes_cannot_share_a_folder(tmp_path):
    folder = tmp_path / "x"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert read_run(folder).state == "running"
        for start in (lambda: Run.open(folder), lambda: Run.create(folder, CONFIG, {}, overwrite=True)):
            with pytest.raises(RunError, match=f"in use by process {child.pid} on "):
                start()
        assert read_metrics(folder)[0]["loss"] == 1.0
        child.send_signal(signal.SIGKILL)
    assert read_run(folder).state == "killed"
    with Run.open(folder) as run:
        assert read_run(folder).state == run.state == "running"
    assert read_run(folder).state == "finished"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="there is no run folder"):
        Run.open(tmp_path / "none")
    with pytest.raises(RunError, match="not a run folder"):
        Run.open(tmp_path)
    Run.create(tmp_path / "x", CONFIG, {}).close()
    (tmp_path / "x" / "run.json").write_text('{"state": ')
    for use in (Run.open, read_run):
        with pytest.raises(RunError, match=r"run\.json is damaged"):
            use(tmp_path / "x")
    Run.create(tmp_path / "x", CONFIG, {}, overwrite=True).close()  # no failed attempt kept the lock


# Resume


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(folder)]


def test_a_resumed_run_reads_as_if_never_interrupted(tmp_path):
    def train(run: Run, start: int, stop: int) -> None:
        for step in range(start + 1, stop + 1):
            run.log(step, {"loss": 1 / step})
            if step % 4 == 0:
                run.save_checkpoint(step, nothing, limit=2)

    with Run.create(tmp_path / "whole", CONFIG, {}) as run:
        train(run, 0, 12)
    with pytest.raises(KeyboardInterrupt), Run.create(tmp_path / "cut", CONFIG, {}) as run:
        train(run, 0, 10)
        raise KeyboardInterrupt
    with open(tmp_path / "cut" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 11, "lo')  # a kill cut this line short
    (tmp_path / "cut" / "checkpoint-12.tmp-123").mkdir()
    with Run.open(tmp_path / "cut") as run:
        newest, _ = newest_complete(run.folder)
        run.rewind(saved_step(newest))
        assert losses(run.folder) == [(step, 1 / step) for step in range(1, 9)]
        train(run, saved_step(newest), 12)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    names = [sorted(path.name for path in (tmp_path / run).iterdir()) for run in ("cut", "whole")]
    assert names[0] == names[1]
    assert len(facts(tmp_path / "cut")["resumes"]) == 1
    assert "checkpoint-12.tmp-123" in (tmp_path / "cut" / "training.log").read_text()


def test_metrics_are_on_the_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    events: list[int | str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(Path(new).name), rename(old, new)))
    with Run.create(tmp_path / "x", CONFIG, {}) as run:
        run.log(1, {"loss": 1.0})
        run.save_checkpoint(1, nothing, limit=None)
    assert (run.folder / "metrics.jsonl").stat().st_ino in events[: events.index("checkpoint-1")]


def test_rewinding_past_a_damaged_checkpoint(tmp_path):
    with Run.create(tmp_path / "x", CONFIG, {}) as run:
        for step in (1, 2, 3):
            run.log(step, {"loss": 1.0})
            run.save_checkpoint(step, nothing, limit=3)
    (run.folder / "checkpoint-3" / "state.json").write_text("[]")
    with Run.open(tmp_path / "x") as run:
        newest, skipped = newest_complete(run.folder)
        assert newest.name == "checkpoint-2" and "checkpoint-3" in skipped[0]
        run.rewind(2)
        assert [path.name for path in list_checkpoints(run.folder)] == ["checkpoint-1", "checkpoint-2"]
        assert (run.folder / "checkpoint-3.set-aside").is_dir()
        assert [line["step"] for line in read_metrics(run.folder)] == [1, 2]


def test_a_line_cut_short_is_not_joined_to_the_next(tmp_path):
    with Run.create(tmp_path / "x", CONFIG, {}) as run:
        run.log(1, {"loss": 1.0})
    with open(run.folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2')
    assert losses(run.folder) == [(1, 1.0)]
    with Run.open(run.folder) as run:
        run.log(2, {"loss": 2.0})
    assert losses(run.folder) == [(1, 1.0), (2, 2.0)]


def test_a_damaged_line_is_named(tmp_path):
    with Run.create(tmp_path / "x", CONFIG, {}) as run:
        for step in (1, 2, 3):
            run.log(step, {"loss": 1.0})
    path = run.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"st\xffp": 2'))
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(run.folder)
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is damaged"):
        Run.open(run.folder)
    assert path.read_bytes().count(b"\n") == 3


def test_what_is_not_finite_becomes_null_and_what_is_no_number_is_refused(tmp_path):
    with Run.create(tmp_path / "x", CONFIG, {}) as run:
        run.log(1, {"loss": float("nan"), "grad_norm": torch.tensor(float("inf"))})
        with pytest.raises(TypeError, match="metric note must be a number"):
            run.log(2, {"note": "text"})
        with pytest.raises(RunError, match=r"results\.json: loss is nan"):
            run.write_results({"loss": float("nan")})
    (line,) = read_metrics(run.folder)
    assert line["loss"] is None and line["grad_norm"] is None


# Secrets


def test_no_secret_is_written_anywhere(tmp_path, monkeypatch):
    token, key, other = "hf_" + "AbC1" * 9, "0123456789abcdef" * 2, "s3cr3t-pa55word"
    monkeypatch.setenv("HF_TOKEN", "plain-looking-token-1")
    monkeypatch.setenv("WANDB_API_KEY", key)
    secrets = [token, key, other, "plain-looking-token-1", "given-on-the-line", "spaced-one"]
    command = ["posttrain", "train", f"data.source=https://me:{other}@host/x", f"--note={token}", f"x={key}"]
    command += ["hub.token=given-on-the-line", "--api-key", "spaced-one", "training.tokens_per_pack=4096", "seed=1"]
    monkeypatch.setattr(sys, "argv", command)
    config = f"name: toy\nnote: {token}\nurl: https://me:{other}@host/x\n"
    with pytest.raises(DataError), Run.create(tmp_path / "x", config, {"note": ["plain-looking-token-1"]}) as run:
        logging.getLogger("posttrain").info("logging in with %s", key)
        run.write_results({"who": token})
        raise DataError(f"https://me:{other}@host/x is gone")
    with Run.open(tmp_path / "x") as run:
        run.write_config(config)
    for path in (tmp_path / "x").rglob("*"):
        text = path.read_text() if path.is_file() else ""
        assert not [secret for secret in secrets if secret in text], f"{path.name} holds a secret"
    shown = read_run(tmp_path / "x").provenance["command"]
    assert "training.tokens_per_pack=4096 seed=1" in shown and "@host/x" in shown and "hub.token=***" in shown


def test_what_is_no_secret_stays(monkeypatch):
    """Values of variables that are places or words, settings of tokens, though their names end as a secret's do."""
    ordinary = {
        "MYAPP_PWD": "/home/me/work",
        "SORT_KEY": "created_at",
        "SSH_AUTH_SOCK": "/tmp/agent.1",
        "key_path": "key-1-of-me",
    }
    hidden = {"DB_PASSWD": "letters-alone", "API_KEY": "a1b2c3d4", "MY_PAT": "Ab-cdefghi"}
    for name, value in (ordinary | hidden).items():
        monkeypatch.setenv(name, value)
    for value in ordinary.values():
        assert redact(f"{value}/runs") == f"{value}/runs"
    for value in hidden.values():
        assert redact(f"{value}/runs") == "***/runs"
    settings = ["data.template.stop_token=<|im_end|>", "--max-new-tokens=512", "t={pad_token: x}"]
    assert redact_arguments(settings) == settings


SECRETS = [  # what is written, the secret in it
    ("https://ghp_abcDEF123456789@github.com/a/b", "ghp_abcDEF123456789"),
    ("https://:Abc123def@host/x", "Abc123def"),
    ("https://a.blob/x?sv=2024&sig=aB3%2Fx%3D&se=1", "aB3%2Fx%3D"),
    ("https://s3/x?X-Amz-Credential=AKIAX/2024/eu&X-Amz-Date=1", "AKIAX/2024/eu"),
    ("https://s3/x?X-Amz-Security-Token=abc", "abc"),
    ("Authorization: Bearer abc.def", "abc.def"),
    ("{'authorization': 'Basic dXNlcjpw'}", "dXNlcjpw"),
    ("sent with Bearer abcdefghijklmnop1234", "abcdefghijklmnop1234"),
    ("parameters: {metadata: {api_key: plainword}}", "plainword"),
    ('{"clientSecret": "s3cr3t-value"}', "s3cr3t-value"),
    ("password=correcthorse", "correcthorse"),
    *((f"key {value} here", value) for value in (
        "gsk_" + "a1" * 12, "nvapi-" + "a1" * 12, "r8_" + "a1" * 12, "ASIA" + "A1" * 8, "npm_" + "a1" * 18,
        "sk_live_" + "a1" * 8, "ya29." + "a1" * 12, "dapi" + "a1" * 16, "glrt-" + "a1" * 12,
        "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_secrets_by_their_form_and_name_are_redacted(text, secret):
    assert secret not in redact(text) and "***" in redact(text) == redact(redact(text))


def test_ordinary_settings_and_messages_are_left_alone():
    for text in (
        "ssh://git@github.com/a", "https://medium.com/@someone/x", "stop token: <|im_end|>", "eos_token: abcd",
        "tokens: mean 470, P50 473", "prompt tokens: 470", "tokens_per_pack: 8192", "sort_key: length", "key: value",
        "api_key_env: OPENAI_API_KEY", "token: ${HF_TOKEN}", "num_tokens: 1.2M", "the bearer of this", "password: null",
        "max_tokens: 12", "new_tokens: [abcd]", "author: someone",
    ):  # fmt: skip
        assert redact(text) == text
    settings = {"stop_token": "abc", "columns": {"key": "id"}, "tokens": ["a"], "password": None, "pad_token": "<pad>"}
    assert redact(settings) == settings


def test_text_of_tokens_and_names_of_columns_stay():
    """In mappings, in strings and as arguments."""
    kept = [
        ("sort_key", "Length2"), ("sortKey", "QuestionLength2"), ("keys", ["Q1", "A1"]), ("key", "Answer_1"),
        ("token", "Hello World"), ("token", "Ġhello"), ("token", "### Response:"), ("end_token", "###"),
        ("token", "they're"), ("think_end_token", "Answer 42:"), ("image_token", "IMG_1234567"),
        ("token", "▁unbelievable"), ("new_tokens", ["<tool>", "Ġa1B2c3D4"]), ("answer_key", "Solution"),
        ("data.label_keys", ["Label1", "Label2"]),
    ]  # fmt: skip
    hidden = [
        ("token", "a1b2c3d4e5"), ("token", "Ab-cd1efghi"), ("key", "AKq8Zx91mmPQ"), ("keys", ["Zx81-mmPQ-77aa"]),
        ("sort_key", "0123456789abcdef"), ("hf_token", "Hello World"), ("hf_token", "Ab1"), ("api_key", "plainword"),
        ("user_token", "Length2"), ("bot_token", "Hello2"), ("password", "Hello World"), ("pass", "Length2"),
        ("token", "for me: a1b2c3d4e5"), ("openai.key", "dXNlcjpwYXNz"), ("token", "hunter22"),
        ("wandb_key", "Length2"),
    ]  # fmt: skip
    for name, value in kept:
        assert redact({name: value}) == {name: value}
        assert isinstance(value, list) or redact(f"{{{name}: '{value}'}}") == f"{{{name}: '{value}'}}"
    for name, value in hidden:
        assert redact({name: value}) == {name: ["***"] if isinstance(value, list) else "***"}, name
    arguments = ["data.sort_key=Length2", "--end-token", "###", "t.end_token=###", "x={token: 'Hello World'}"]
    assert redact_arguments(arguments) == arguments
    assert redact_arguments(["--key", "word", "token=word"]) == ["--key", "***", "token=***"]


def test_secrets_by_their_keys_are_in_no_file_of_a_run(tmp_path, monkeypatch):
    """Nor those of the environment with white space around them, and whole values are hidden."""
    monkeypatch.setenv("SOME_TOKEN", "  tok-with-spaces \n")
    values = {"api_key": "my own words", "client_secret": "x", "tokens": 5, "password": ["p-1", "p-2"]}
    config = yaml.safe_dump({"name": "x", "method": {"judge": {"parameters": {"metadata": values}}}})
    with Run.create(tmp_path / "x", config, {"parameters": values}) as run:
        logging.getLogger("posttrain").warning("it sent %s and %s", "tok-with-spaces", {"api_key": "my own words"})
        run.write_config(config)
    written = "".join(file.read_text() for file in (tmp_path / "x").iterdir() if file.is_file())
    assert not any(secret in written for secret in ("own words", "p-1", "p-2", "tok-with"))
    hidden = values | {"api_key": "***", "client_secret": "***", "password": ["***", "***"]}
    assert yaml.safe_load(run.config_yaml)["method"]["judge"]["parameters"]["metadata"] == hidden
    assert redact(hidden) == hidden


def test_runs_are_found_while_one_takes_folders_away(tmp_path, monkeypatch):
    for name in ("a/b/c", "a/d", "a/b/c/too/deep"):
        Run.create(tmp_path / name, CONFIG, {}).close()
    (tmp_path / "a/d/checkpoint-1.tmp-7").mkdir()
    scandir = os.scandir

    def vanished(path="."):
        if "checkpoint" in str(path):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanished)
    assert find_runs(tmp_path) == [tmp_path / "a/b/c", tmp_path / "a/d"]


# Speed and weight


def test_reading_a_run_imports_neither_torch_nor_matplotlib(tmp_path):
    with Run.create(tmp_path / "x", CONFIG, {}) as run:
        run.log(1, {"loss": 1.0})
    code = (
        "import sys; from pathlib import Path; from posttrain.runs.finding import find_runs; "
        "from posttrain.runs.summary import read_run; "
        "print([read_run(f).state for f in find_runs(Path(sys.argv[1]))]); "
        "print([m for m in ('torch', 'matplotlib', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["['finished']", "[]"]


def test_a_log_without_room_is_given_up_and_said_once(tmp_path, monkeypatch, capsys):
    folder, write = tmp_path / "x", os.write

    def full(descriptor: int, data: bytes) -> int:
        if os.path.samestat(os.fstat(descriptor), (folder / "training.log").stat()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with Run.create(folder, CONFIG, {}) as run:
        monkeypatch.setattr(os, "write", full)
        logging.getLogger("posttrain").info("one")
        logging.getLogger("posttrain").info("two")
        run.log(1, {"loss": 1.0})
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert read_run(folder).state == "finished"


@pytest.mark.parametrize("name", ["training.log", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["link", "nowhere", "device", "pipe", "folder"])
def test_what_is_no_file_is_not_appended_to(name, kind, tmp_path):
    """A run folder may be a stranger's, and a link in it lead to any file of the user."""
    Run.create(tmp_path / "x", CONFIG, {}).close()
    path, other = tmp_path / "x" / name, tmp_path / "other"
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": Path("/dev/null"), "link": other, "nowhere": tmp_path / "missing"}[kind])
    other.write_text("")
    refused = "it is a (link|pipe, folder or device), not a file|Is a directory|No such device"
    with pytest.raises(RunError, match=f"{name}: ({refused})"), Run.open(tmp_path / "x") as run:
        run.log(1, {"loss": 1.0})
    assert other.read_text() == "" and not (tmp_path / "missing").exists()


def test_a_check_keeps_its_largest_value_and_a_failure_until_it_passes_after_a_resume(tmp_path):
    def saved() -> dict:
        return json.loads((tmp_path / "a/run.json").read_text())["checks"]["steps"]

    with pytest.raises(ValueError), Run.create(tmp_path / "a", CONFIG, {}) as run:
        for value in (1.0, 3.0, 2.0):
            run.record_check(Finding("steps", value, 4.0, unit=""))
        assert saved()["value"] == 1.0  # later ones are written at the end
        run.set_counters({})
        assert saved() == {"value": 3.0, "limit": 4.0, "failed": False, "times": 3}
        run.record_check(Finding("steps", 5.0, 4.0, unit="", failed=True))
        assert saved() == {"value": 5.0, "limit": 4.0, "failed": True, "times": 4}
        raise ValueError
    with Run.open(tmp_path / "a") as run:
        assert saved()["failed"]
        run.record_check(Finding("steps", 0.0, 4.0, unit=""))
        assert saved() == {"value": 0.0, "limit": 4.0, "failed": False, "times": 1}
        run.record_check(Finding("steps", float("nan"), 4.0, unit="", failed=True))
        assert saved() == {"value": None, "limit": 4.0, "failed": True, "times": 2}
