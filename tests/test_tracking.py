"""Trackers: what TensorBoard, Weights & Biases and trackio have on disk is what metrics.jsonl has."""

import json
import logging
import os
import re
import sqlite3
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain import runner
from posttrain.base.errors import ConfigError
from posttrain.base.imports import installing
from posttrain.cli import main
from posttrain.config import dump, load
from posttrain.runs.metrics import read_metrics
from posttrain.runs.run import Run
from posttrain.runs.tracking import Tracking, tagged, wandb_mode
from posttrain.training.loop import Loop

ALL = ["tensorboard", "wandb", "trackio"]


@pytest.fixture
def trackio_dir() -> Path:
    """trackio reads its folder from the environment when it is imported: tests/conftest.py has set it."""
    return Path(os.environ["TRACKIO_DIR"])


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def settings(tmp_path: Path, **tracking):
    given = {
        "name": "hh",
        "output_dir": str(tmp_path / "runs"),
        "model": "gpt2",
        "method": "dpo",
        "data": {"source": "a.jsonl"},
        "tracking": tracking,
    }
    file = tmp_path / "a.json"
    file.write_text(json.dumps(given))
    return load(file).config


# --- reading back ---------------------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> Counter:
    """(step, tag, value as float32) of every scalar in the event files of a folder."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: Counter = Counter()
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found[event.step, value.tag, round(float(make_ndarray(value.tensor)), 6)] += 1
    return found


def wandb_records(file: Path):
    """The records of an offline run: a LevelDB log of protocol buffers in blocks of 32 KiB, after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def read_wandb(folder: Path) -> tuple[Counter, list]:
    """(step, tag, value) of the history of every offline run in a folder, and their run records."""
    found: Counter = Counter()
    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(file):
            if record.HasField("run"):
                runs.append(record.run)
            for item in record.history.item:
                tag = item.key or "/".join(item.nested_key)
                if not tag.startswith("_"):
                    found[record.history.step.num, tag, round(json.loads(item.value_json), 6)] += 1
    return found, runs


def read_trackio(folder: Path, project: str, name: str) -> Counter:
    found: Counter = Counter()
    with sqlite3.connect(folder / f"{project}.db") as database:
        rows = database.execute("select step, metrics from metrics where run_name = ?", [name]).fetchall()
    for step, values in rows:
        found.update((step, tag, round(value, 6)) for tag, value in json.loads(values).items())
    return found


def in_metrics(folder: Path) -> Counter:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Counter((line["step"], tag, round(value, 6)) for line in lines for tag, value in tagged(line).items())


def as_float32(found: Counter) -> Counter:
    return Counter({(s, t, round(float(torch.tensor(v, dtype=torch.float32)), 6)): n for (s, t, v), n in found.items()})


# --- a training -----------------------------------------------------------------------------------------------------


def training(tmp_path: Path, shared: Path, model: Path, report_to: list[str]):
    given = {
        "name": "hh",
        "output_dir": str(tmp_path),
        "model": str(model),
        "method": "dpo",
        "data": {"source": str(shared / "data/hh-harmless"), "format": "hh", "max_rows": 12, "max_length": 400,
                 "validation": {"rows": 2}},
        "training": {"batch_size": 2, "max_steps": 4, "learning_rate": 1e-3, "tokens_per_pack": 1024},
        "evaluation": {"eval_steps": 2},
        "checkpoint": {"save_steps": 2},
        "tracking": {"logging_steps": 1, "report_to": report_to, "project": "mine" if report_to else "posttrain"},
    }  # fmt: skip
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(given))
    return load(file).config


@pytest.mark.slow
def test_every_tracker_has_what_the_run_folder_has(tmp_path, shared, scratch_model, trackio_dir, monkeypatch, caplog):
    """Also over a crash after step 3 and a resume from step 2: step 3 is trained twice and sent once."""
    caplog.set_level(logging.INFO, "posttrain")
    plain = training(tmp_path / "plain", shared, scratch_model, [])
    runner.train(plain)

    config, update = training(tmp_path / "tracked", shared, scratch_model, ALL), Loop.update

    def crash(self, packs, objective):
        if self.state.step == 3:
            raise KeyboardInterrupt("power cut")
        update(self, packs, objective)

    with monkeypatch.context() as broken:
        broken.setattr(Loop, "update", crash)
        with pytest.raises(KeyboardInterrupt):
            runner.train(config)
    runner.train(config, resume=True)

    folder = tmp_path / "tracked/hh"
    expected = in_metrics(folder)
    assert {tag for _, tag, _ in expected} >= {"train/loss", "eval/loss", "train/rewards/margins", "train/num_tokens"}
    assert {step for step, tag, _ in expected if tag == "train/loss"} == {1, 2, 3, 4}
    assert read_tensorboard(folder / "tracking") == as_float32(expected)
    history, runs = read_wandb(folder / "tracking")
    one_epoch_a_step = Counter(dict.fromkeys(expected, 1))  # a training and an evaluation line share step and epoch
    assert Counter(dict.fromkeys(history, 1)) == one_epoch_a_step and max(history.values()) == 1
    assert len(runs) == 2 and runs[0].run_id == runs[1].run_id
    assert (runs[0].display_name, runs[0].project, runs[0].job_type) == ("hh", "mine", "dpo")
    assert read_trackio(trackio_dir, "mine", "hh") == expected

    # Trackers change nothing: the same weights, and the same numbers but for times.
    one, two = (load_file(tmp_path / name / "hh/final/model.safetensors") for name in ("plain", "tracked"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert in_metrics(tmp_path / "plain/hh") == expected
    said = caplog.text
    assert "tensorboard --logdir" in said and "wandb sync" in said and "trackio show --project mine" in said


def curves(folder: Path) -> Counter:
    """(step, tag, value) as TensorBoard shows a folder: what a later file discards is not there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found: Counter = Counter()
    for tag in shown.Tags()["scalars"]:
        found.update((event.step, tag, round(event.value, 6)) for event in shown.Scalars(tag))
    return found


OTHERS = {  # lines after the resume at step 2, when steps 3 to 5 were sent
    "another rate": {3: 0.31, 4: 0.21, 5: 0.11, 6: 0.01},
    "another rate later": {3: 0.3, 4: 0.21, 5: 0.11, 6: 0.01},
    "fewer steps": {3: 0.3, 4: 0.2},
    "fewer lines": {4: 0.2, 6: 0.01},
    "the same": {3: 0.3, 4: 0.2, 5: 0.1, 6: 0.01},
    "no line after": {},
}


@pytest.mark.parametrize(("name", "clock"), [*((name, "right") for name in OTHERS), ("fewer steps", "ahead")])
def test_what_a_resume_discards_is_not_shown(tmp_path, trackio_dir, caplog, name, clock):
    """TensorBoard shows the lines of metrics.jsonl and no others; the others keep what they have, with a warning.

    Also where the machine that wrote before has a clock ahead of this one's: TensorBoard reads files by their names.
    """
    config = settings(tmp_path, report_to=ALL)
    before = {1: 0.5, 2: 0.4, 3: 0.3, 4: 0.2, 5: 0.1}
    with Run.create(tmp_path / "runs/hh", dump(config), {}) as run, Tracking(config, run):
        for step, rate in before.items():
            run.log(step, {"learning_rate": rate, "loss": 1.0})
    logged = [line for line in read_metrics(run.folder) if line["step"] > 2]
    assert len(logged) == 3
    if clock == "ahead":
        [events] = (tmp_path / "runs/hh/tracking").glob("*tfevents*")
        events.rename(events.with_name(re.sub(r"tfevents\.\d+", "tfevents.9999999999", events.name)))
    with Run.open(tmp_path / "runs/hh") as run:
        run.rewind(2)
        with Tracking(config, run, logged):
            for step, rate in OTHERS[name].items():
                run.log(step, {"learning_rate": rate, "loss": 1.0})
    folder = tmp_path / "runs/hh"
    expected = as_float32(in_metrics(folder))
    assert curves(folder / "tracking") == expected
    assert {step for step, _, _ in expected} == {1, 2, *OTHERS[name]}
    said = [line for line in caplog.messages if "values that it logged for steps 3 to 5 before the resume" in line]
    assert [line.split()[0] for line in said] == ([] if name == "the same" else ["wandb", "trackio"])
    if name == "the same":
        assert read_tensorboard(folder / "tracking") == expected, "nothing is written twice"


def test_a_line_after_a_resume_is_compared_with_few(tmp_path):
    """Comparisons of steps, of 200 lines: once each was compared with all that were sent before the resume."""
    compared = []

    class Step(int):
        def __lt__(self, other):
            compared.append(other)
            return int(self) < int(other)

    config = settings(tmp_path, report_to=["tensorboard"])
    lines = [{"step": Step(step), "time": 0.0, "loss": 1.0} for step in range(200)]
    with Run.create(tmp_path / "runs/hh", dump(config), {}) as run, Tracking(config, run, lines[::-1]) as tracking:
        compared.clear()
        for line in lines:
            tracking._log(line)
        assert len(compared) <= len(lines) and not tracking._waiting and tracking._again == lines


# --- pieces ---------------------------------------------------------------------------------------------------------


SECRETS = {
    "MY_TOKEN": "not-for-others-1", "GITHUB_PAT": "not-for-others-2", "DB_PASSWD": "not-for-others-3",
    "MY_CREDENTIALS": "not-for-others-4", "PGPASSWORD": "not-for-others-5", "SERVICE_AUTH_2": "not-for-others-6",
}  # fmt: skip


def test_nothing_that_is_written_has_a_secret(tmp_path, trackio_dir, monkeypatch):
    """From the environment, the settings or the command line, in the run folder or in any tracker's own files."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    everything = " ".join(SECRETS.values())
    address = "https://me:not-for-others-7@host/rows.jsonl?api_key=not-for-others-8"
    arguments = [everything, "--hf-token", "not-for-others-9", "db_passwd=not-for-others-a", address]
    arguments += ["rewards=[{type: python, api_key: not-for-others-b}]"]
    monkeypatch.setattr(sys, "argv", ["posttrain", "train", *arguments])
    config = settings(tmp_path, report_to=ALL, logging_dir=str(tmp_path / "logs"), project="secrets")
    data = config.data.model_copy(update={"source": address, "system_prompt": everything})
    config = config.model_copy(update={"data": data})
    (tmp_path / "a.json").unlink()
    folder = tmp_path / "runs/hh/gpt2/dpo"
    with Run.create(folder, dump(config), {"asked": arguments[0]}) as run, Tracking(config, run):
        run.log(1, {"loss": 0.5, "grad_norm": float("nan")})
        logging.getLogger("posttrain").warning("cannot read %s %s", address, everything)
        run.write_results({"source": address})
    assert sys.argv[2:] == arguments
    place = tmp_path / "logs/hh/gpt2/dpo"
    assert read_tensorboard(place) == Counter({(1, "train/loss", 0.5): 1})
    history, [sent] = read_wandb(place)
    assert history == Counter({(1, "train/loss", 0.5): 1})
    assert (sent.display_name, sent.run_group) == ("hh/gpt2/dpo", "hh")
    assert {item.key for item in sent.config.update} >= {"seed", "training", "method"}
    files = [path for top in (tmp_path, trackio_dir) for path in top.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"run.json", "config.yaml", "training.log", "secrets.db"}
    for path in files:
        written = path.read_bytes()
        assert b"not-for-others" not in written, path
    [sent_later] = place.glob("wandb/offline-run-*/*.wandb")
    assert b"--hf-token" in sent_later.read_bytes()  # wandb has the command line, without what is secret


def test_a_tracker_that_fails_is_given_up(tmp_path, caplog):
    config = settings(tmp_path, report_to=["tensorboard"])
    with Run.create(tmp_path / "runs/hh", "", {}) as run, Tracking(config, run) as tracking:
        run.log(1, {"loss": 0.5})
        tracking._open["tensorboard"]._writer.close = tracking._open["tensorboard"].log = fail
        run.log(2, {"loss": 0.4})
        run.log(3, {"loss": 0.3})
    assert [line["loss"] for line in read_metrics(run.folder)] == [0.5, 0.4, 0.3]
    assert caplog.text.count("tensorboard failed and is dropped (metrics.jsonl has everything): no space") == 1


def fail(*arguments, **named):
    raise OSError("no space")


@pytest.mark.parametrize("name", ALL)
def test_a_tracker_that_is_not_installed_names_the_extra(tmp_path, name, monkeypatch, capsys):
    """Before anything is trained or written."""
    monkeypatch.setitem(sys.modules, name, None)
    settings(tmp_path)
    assert main(["train", str(tmp_path / "a.json"), f"tracking.report_to={name}"]) == 1
    message = f"tracking.report_to: {name} needs {name}, which is not installed: {installing('track')}"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        ({"report_to": ["wandb", "wandb"]}, "report_to names a tracker twice"),
        ({"report_to": ["wanb"]}, "did you mean wandb"),
        ({"report_to": ["trackio"], "logging_dir": "logs"}, "is read by tensorboard and wandb, which report_to does"),
        ({"report_to": ["tensorboard"], "project": "p"}, "project is read by wandb and trackio"),
        ({"wandb_mode": "offline"}, "wandb_mode is read by wandb"),
    ],
)
def test_settings_that_nothing_would_read(tmp_path, tracking, message):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, **tracking)


def test_one_name_is_a_list_of_one(tmp_path):
    assert settings(tmp_path, report_to="trackio").tracking.report_to == ("trackio",)


def test_offline_unless_there_is_a_key(tmp_path, monkeypatch):
    def mode(**tracking) -> str | None:
        return wandb_mode(settings(tmp_path, report_to="wandb", **tracking).tracking)

    assert mode() == "offline"
    Path(tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0123456789")
    (tmp_path / ".netrc").chmod(0o600)
    assert mode() == "online"
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert mode() == "online" and mode(wandb_mode="offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert mode() is None and mode(wandb_mode="online") == "online"
