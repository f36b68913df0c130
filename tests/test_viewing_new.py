"""What the page New run makes of an address: fields, messages, the settings file, and the processes it starts."""

import re
import sys
import time

import pytest

from posttrain.base.errors import ConfigError
from posttrain.config import load
from posttrain.config.schema.methods import METHOD_NAMES
from posttrain.ui.commands import Commands, Launches, Output
from posttrain.ui.new_page import draft, fields_of, in_reach, new_page, start
from posttrain.ui.parts import Query, address, parse
from posttrain.ui.viewer import Viewer, attempt

WHOLE = {
    "model.path": "a/b", "data.source": "rows.jsonl", "training.max_steps": "20", "training.learning_rate": "3e-4",
    "model.lora": "true", "model.lora.r": "4", "data.columns": "{prompt: a, completion: '1'}",
    "data.system_prompt": "a: b", "checkpoint.best_metric": "null", "data.validation.ratio": "0.1",
    "training.optimizer": "adamw_8bit",
}  # fmt: skip


def asked(**values: str) -> Query:
    return parse(address("/new", **values))


def test_the_file_reads_back_as_what_was_typed(tmp_path):
    root = tmp_path / "12 ${HOME}: runs"  # a folder that YAML would read as something else
    for method, own in {"sft": {}, "ipo": {}, "ppo": {"rewards": "[{type: math}]", "method.kl_coef": "0.01"}}.items():
        made = draft(asked(**WHOLE, **own, **{"method.type": method}), root)
        file = tmp_path / f"{method}.yaml"
        file.write_text(made.text)
        assert made.config is not None and made.config == load(file).config, method
        assert made.config.output_dir == str(root) and made.config.name == made.name == f"{made.config.method.type}-b"


def test_messages_are_those_of_the_command_line_at_their_fields(tmp_path):
    wrong = {
        **WHOLE,
        "training.max_steps": "ten",
        "training.optimizer": "adam",
        "data.max_length": "9000",
        "seed": "[1",
    }
    given = {path: text for path, text in wrong.items() if path != "seed"}
    made = draft(asked(**given), tmp_path)
    with pytest.raises(ConfigError) as refused:
        load(None, [f"{path}={text}" for path, text in {"method": "sft", **given}.items()])
    lines = str(refused.value).splitlines()[1:]
    said = [line.strip().removeprefix("override ").partition(": ")[2] for line in lines]
    assert sorted(made.problems.values()) == sorted(said) and len(said) == 2
    assert made.config is None and not made.elsewhere
    assert "does not close its bracket" in draft(asked(**wrong), tmp_path).problems["seed"]
    conflict = draft(asked(**{**WHOLE, "data.max_length": "9000"}), tmp_path)
    assert list(conflict.problems) == ["training.tokens_per_pack"]


def test_every_method_has_a_form_of_its_settings(tmp_path):
    viewer = Viewer(tmp_path, tmp_path / "cache")
    for method in METHOD_NAMES:
        page = new_page(viewer, asked(**{"method.type": method}))
        for setting in fields_of(method):
            path = "rewards.0.type" if setting.path == "rewards" else setting.path
            assert page.count(f'name="{path}"') == 1, path
        for shown in re.findall(r'placeholder="([^"]*)"|<option[^>]*>([^<]*)<', page):
            assert "null" not in "".join(shown), shown
        assert "Still needed: " in page and 'value="start"' not in page
    hostile = new_page(viewer, asked(**{"name": '"><script>x</script>', "model.path": "<img src=x>", "evil": "1"}))
    assert "<script" not in hostile and "<img" not in hostile and "evil" not in hostile


def test_rewards_have_fields_of_their_own(tmp_path):
    """By type; a type that is empty removes a reward, and settings of another type go with it."""
    viewer = Viewer(tmp_path, tmp_path / "cache")
    typed = {
        "rewards.0.type": "math", "rewards.0.target": "9", "rewards.0.weight": "2", "rewards.2.type": "length",
        "rewards.2.target": "12", "rewards.1.weight": "3", "rewards.4.type": "python", "rewards.4.function": "a:b",
        "rewards.5.type": "nonsense",
    }  # fmt: skip
    own = {**WHOLE, "method.type": "grpo"}
    made = draft(asked(**own, **typed), tmp_path)
    assert made.config is not None, made.problems
    assert [reward.type for reward in made.config.rewards] == ["math", "length", "python"]
    assert made.config.rewards[0].weight == 2 and made.config.rewards[1].target == 12
    page = new_page(viewer, asked(**own, **typed))
    assert page.count('name="rewards.3.type"') == 1 and 'name="rewards.3.weight"' not in page
    assert re.search(r'name="rewards.1.target" value="12"', page) and 'name="rewards.0.target"' not in page
    again = draft(asked(**own, rewards="[{type: length, target: 5, name: 'a b, c'}, math]"), tmp_path)
    assert again.config is not None
    assert [(reward.type, reward.name) for reward in again.config.rewards] == [("length", "a b, c"), ("math", None)]
    judge = {"rewards.0.type": "judge", "rewards.0.model": "judge-1", "rewards.0.base_url": "http://127.0.0.1:9/v1"}
    [reward] = draft(asked(**own, **judge), tmp_path).config.rewards
    assert reward.model == "judge-1" and 'name="rewards.0.model"' in new_page(viewer, asked(**own, **judge))
    wrong = new_page(viewer, asked(**own, **{"rewards.0.type": "length", "rewards.0.target": "no"}))
    assert "rewards.0.target is" in wrong and "must be" in wrong
    assert "rewards.0.target is missing" in new_page(viewer, asked(**own, **{"rewards.0.type": "length"}))


def test_models_and_files_in_reach_are_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("rows.jsonl", "data/more.csv", "models/tiny/config.json", "models/tiny/rows.json", "a/b/c/deep.jsonl",
                 ".hidden/x.jsonl", "runs/r/rows.jsonl", "data/notes.md"):  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert in_reach(tmp_path / "runs") == (["models/tiny"], ["rows.jsonl", "data/more.csv"])
    page = new_page(Viewer(tmp_path / "runs", tmp_path / "cache"), asked(**{"method.type": "distill"}))
    assert '<option value="rows.jsonl">' in page and '<option value="models/tiny">' in page
    for setting, offered in (("data.source", "sources"), ("model.path", "models"), ("method.teacher", "models")):
        assert re.search(rf'name="{setting}"[^>]* list="{offered}"', page), setting


def test_a_name_that_is_taken_gets_a_number_or_is_refused(tmp_path):
    viewer = Viewer(tmp_path, tmp_path / "cache")
    (tmp_path / "sft-b").mkdir()
    assert draft(asked(**WHOLE), tmp_path).name == "sft-b-2"
    taken = address("/new", **WHOLE, name="sft-b")
    assert "A run named sft-b already exists" in attempt(new_page, viewer, taken)
    assert "a run named sft-b already exists" in str(attempt(start, viewer, taken))
    assert "settings are incomplete" in str(attempt(start, viewer, "?name=x"))
    assert not (tmp_path / "configs").exists()


def test_a_run_is_a_process_of_its_own_and_starts_once(tmp_path, monkeypatch):
    program = "import os, sys, time; print(sys.argv[1:], os.getsid(0) == os.getpid(), flush=True); time.sleep(30)"
    monkeypatch.setattr("posttrain.ui.commands.command", lambda given: [sys.executable, "-c", program, *given])
    launches = Launches(tmp_path)
    launch = launches.start("one", "method: sft\n")
    with pytest.raises(ConfigError, match="a run named one already exists"):
        launches.start("one", "method: sft\n")
    try:
        file = launch.log.with_suffix(".yaml")
        assert file.read_text() == "method: sft\n" and not launch.ended
        _until(lambda: launch.log.read_text() == f"['train', '{file}'] True\n")
    finally:
        launch.process.kill()
        launch.process.wait()
    assert launch.ended and launches.find("one") is launch


def test_a_command_is_asked_once_and_its_error_is_said(tmp_path, monkeypatch):
    program = (
        "import pathlib, sys; text = pathlib.Path(sys.argv[2]).read_text()\n"
        "sys.exit('note: x\\nerror: it is wrong') if 'bad' in text else print(text)"
    )
    monkeypatch.setattr("posttrain.ui.commands.command", lambda given: [sys.executable, "-c", program, *given])
    commands = Commands(tmp_path / "asked")
    for text in ("good", "bad"):
        assert commands.find("plan", text) is None and not commands.has_run("plan", text)
        commands.start("plan", text)
    _until(lambda: all((commands.find("plan", text) or Output()).code is not None for text in ("good", "bad")))
    good, bad = commands.find("plan", "good"), commands.find("plan", "bad")
    assert good is not None and bad is not None
    assert (good.text, good.code) == ("good\n", 0) and (bad.text, bad.code) == ("it is wrong", 1)
    commands.start("plan", "good")
    assert commands.has_run("plan", "good") and commands.find("plan", "good", ["--x"]) is None
    assert commands.find("plan", "good") is good and not list((tmp_path / "asked").iterdir())


def _until(holds, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
