"""The command line's settings: starter files, presets, flags made from the schema, and how errors are reported."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from settings_reference import REWARDS, with_reference

from posttrain.base.errors import DataError, RunError
from posttrain.cli import main
from posttrain.cli.command import guarded
from posttrain.cli.flags import plain, short_names
from posttrain.cli.train import saved_config
from posttrain.config import EvaluationDataset, SourceConfig, dump, load, preset_names
from posttrain.config.reading.fields import all_settings
from posttrain.config.render import EXAMPLES, STARTER, starter
from posttrain.config.schema.methods import METHOD_NAMES, METHODS

ROOT = Path(__file__).parent.parent
GOOD = "model: gpt2\nmethod: sft\ndata: {source: rows.jsonl}\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command line in an empty folder that holds good.yaml: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "good.yaml").write_text(GOOD)

    def _run(*args):
        status = main(args)
        out, err = capsys.readouterr()
        return status, out, err

    return _run


def shown(run, *args):
    status, out, err = run("config", "show", *args)
    assert status == 0, err
    return yaml.safe_load(out)


@pytest.mark.parametrize("method", EXAMPLES)
@pytest.mark.parametrize("full", [False, True])
def test_a_starter_file_loads_back_to_the_defaults(run, tmp_path, method, full):
    args = ["config", "new", method, "-o", "new.yaml", *(["--full"] if full else [])]
    assert run(*args)[0] == 0
    text = (tmp_path / "new.yaml").read_text()
    assert text == starter(method, everything=full)
    config = load("new.yaml").config
    paths = [f"model.path={config.models[0].path}", f"data.source={config.data.source}", f"method={method}"]
    online = METHODS[config.method.type].kind == "prompt"
    best = "eval_reward" if online else "eval_loss"
    changed = [] if full else ["data.validation={ratio: 0.05}", f"checkpoint.best_metric={best}"]
    changed += ["rewards=[{type: math}]"] if online else []
    changed += [f"method.teacher={config.method.teacher}"] if method == "distill" else []
    assert config == load(None, [*paths, *changed]).config
    assert all(len(line) <= 110 for line in text.splitlines())


@pytest.mark.parametrize("method", EXAMPLES)
def test_a_full_starter_file_has_every_setting_of_the_method(method):
    """Groups that are off stand behind a `#`; comments say what entries of lists have."""
    text = starter(method, everything=True)
    values = yaml.safe_load(re.sub(r"^( *)#(?! \S)", r"\1", text, flags=re.MULTILINE))
    entries = [*SourceConfig.model_fields, *EvaluationDataset.model_fields]
    for setting in all_settings():
        kind = "dpo" if method == "ipo" else method
        writes_nothing = method == "reward" and setting.path.startswith(("rewards", "rollout."))
        if (setting.methods and kind not in setting.methods) or writes_nothing:
            continue
        if (method, setting.path) == ("ipo", "method.loss_type"):
            continue  # the type says it
        node = values
        for key in setting.path.split("."):
            assert key in node, setting.path
            node = node[key]
        if setting.path == "rewards":
            entries += [info.alias or name for cls in REWARDS for name, info in cls.model_fields.items()]
    assert [name for name in entries if not re.search(rf"\b{name}\b", text)] == []


def test_the_usual_settings_exist():
    assert set(STARTER) <= {setting.path for setting in all_settings()}


def test_a_starter_file_never_replaces_a_file(run, tmp_path):
    status, _, err = run("config", "new", "sft", "--output", "good.yaml")
    assert status == 1 and "good.yaml exists" in err
    assert (tmp_path / "good.yaml").read_text() == GOOD
    assert "cannot be written" in run("config", "new", "sft", "-o", "no/such/folder.yaml")[2]


def test_presets_are_listed_within_80_columns(run):
    status, out, _ = run("config", "list")
    assert status == 0 and all(len(line) <= 80 for line in out.splitlines())
    for name in preset_names():
        assert re.search(rf"^\s*{name}\s", out, re.M), name


def test_show_prints_what_loads_back(run, tmp_path):
    _, out, _ = run("config", "show", "dpo-hh", "training.max_steps=3")
    (tmp_path / "saved.yaml").write_text(out)
    assert load("saved.yaml").config == load("dpo-hh", ["training.max_steps=3"]).config
    assert out == dump(load("saved.yaml").config)


def test_schema_is_json_schema_and_every_setting_is_described(run):
    text = run("config", "schema")[1]
    schema = json.loads(text)
    groups = schema["$defs"]
    assert schema["additionalProperties"] is False and groups["TrainingConfig"]["additionalProperties"] is False
    assert groups["TrainingConfig"]["properties"]["batch_size"]["minimum"] == 1
    # What a file may say in short is allowed, and nothing must be in it: a file may extend another.
    assert {"model", "models", "extends", "method", "data"} <= set(schema["properties"])
    assert schema["properties"]["method"]["anyOf"][0] == {"enum": list(METHOD_NAMES)}
    assert "lora_r" in groups["ModelConfig"]["properties"] and "kl_coef" in groups["DPOMethod"]["properties"]
    assert '"required"' not in text and '"ge"' not in text
    for setting in all_settings():
        node = schema
        for key in setting.path.replace("method.", "DPOMethod.").split(".") if setting.methods == ("dpo",) else []:
            node = groups[key] if key in groups else node["properties"][key]
        assert node is schema or node["description"] == setting.description


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-steps", "7"],
        ["--max_steps=7"],
        ["--training.max-steps", "7"],
        ["--training.max_steps=7"],
        ["training.max_steps=7"],
        ["training.max_steps=9", "--max-steps", "7"],
    ],
)
def test_every_spelling_of_a_flag(run, flags):
    assert shown(run, "good.yaml", *flags)["training"]["max_steps"] == 7
    assert shown(run, *flags, "good.yaml")["training"]["max_steps"] == 7


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--no-shuffle"], False),
        (["--shuffle", "false"], False),
        (["--data.no-shuffle"], False),
        (["--no-data.shuffle"], False),
        (["--shuffle=no"], False),
        (["--shuffle"], True),
        (["--shuffle", "True"], True),
    ],
)
def test_switches(run, flags, value):
    assert shown(run, "good.yaml", *flags)["data"]["shuffle"] is value


@pytest.mark.parametrize(
    ("flags", "rank"),
    [
        (["--lora"], 16),
        (["--lora", "true"], 16),
        (["--lora", "{r: 8}"], 8),
        (["--lora={r: 8}"], 8),
        (["--lora", "--lora-r", "4"], 4),
        (["--lora-r", "4", "--lora"], 4),
        (["--lora", "no"], None),
        (["--no-lora"], None),
    ],
)
def test_a_switch_that_is_a_group_swallows_no_file(run, flags, rank):
    for line in (["good.yaml", *flags], [*flags, "good.yaml"], [*flags, "good.yaml", "seed=3"]):
        lora = shown(run, *line)["models"][0]["lora"]
        assert (lora and lora["r"]) == rank


def test_flags_of_every_kind(run):
    got = shown(
        run, "good.yaml", "--model", "opt", "--lora-r", "4", "--method", "dpo", "--loss-type", "[sigmoid, sft]",
        "--loss-weights", "[1, 0.5]", "--eval-steps", "-1", "--learning-rate", "1e-6", "--validation", "{rows: 5}",
        "--gradient-checkpointing", "auto", "--device", "cpu", "--model-name", "mine", "--name", "trial",
        "--system-prompt", "a: b, c", "--max-prompt-length", "p90",
    )  # fmt: skip
    assert (got["models"][0]["path"], got["models"][0]["name"], got["models"][0]["lora"]["r"]) == ("opt", "mine", 4)
    assert got["method"]["loss_type"] == ["sigmoid", "sft"] and got["method"]["loss_weights"] == [1, 0.5]
    assert got["evaluation"]["eval_steps"] == -1 and got["training"]["learning_rate"] == 1e-6
    assert got["data"]["validation"]["rows"] == 5 and got["training"]["gradient_checkpointing"] == "auto"
    assert (got["devices"]["type"], got["name"], got["data"]["system_prompt"]) == ("cpu", "trial", "a: b, c")
    assert got["data"]["max_prompt_length"] == "p90"


def test_resume_takes_a_folder_or_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "a.yaml").write_text("")
    declared = {"resume", "max-steps"}
    for args, expected in {
        ("--resume",): ["--resume="],
        ("--resume", "a.yaml"): ["--resume=", "a.yaml"],
        ("--resume", "dpo-hh"): ["--resume=", "dpo-hh"],
        ("--resume", "seed=1"): ["--resume=", "seed=1"],
        ("--resume", "--max-steps", "3"): ["--resume=", "--max-steps=3"],
        ("--resume", "runs"): ["--resume=runs"],
        ("--resume", "gone/checkpoint-3"): ["--resume=gone/checkpoint-3"],
        ("--resume=anything", "a.yaml"): ["--resume=anything", "a.yaml"],
    }.items():
        assert plain(list(args), declared) == expected


def test_settings_without_a_file(run):
    got = shown(run, "method=sft", "data.source=rows.jsonl", "--model", "gpt2")
    assert (got["method"]["type"], got["models"][0]["path"]) == ("sft", "gpt2")


def test_every_setting_has_a_flag_with_its_description_in_help(run):
    status, out, _ = run("train", "--help")
    assert status == 0 and all(len(line) <= 80 for line in out.splitlines())
    for setting in all_settings():
        assert re.search(rf"--{short_names()[setting.path]}\s", out), setting.path
    for flag in ("--dry-run", "--resume", "--overwrite", "--model-index", "--debug"):
        assert flag in out
    said = " ".join(re.sub(r"[│\n]", " ", out).split())
    assert "dpo: Strength of the regularisation towards the reference; IPO's tau. [0.1] orpo: Weight of" in said
    assert "One of auto, float32, bfloat16, float16. [auto]" in said


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["train", "god.yaml"], 1, "there is no file or preset god.yaml; did you mean good.yaml?"),
        (["train", "good.yaml", "training.max_step=1"], 1, "did you mean training.max_steps?"),
        (["train", "good.yaml", "--max-step", "1"], 2, "there is no flag --max-step; did you mean --max-steps?"),
        (["train", "good.yaml", "--lr", "1"], 2, "there is no flag --lr; write --learning-rate"),
        (["train", "good.yaml", "--max-steps"], 2, "--max-steps needs a value"),
        (["plan", "data", "rows.jsonl"], 1, "data is a setting, not a file or preset: write data=VALUE"),
        (["plan", "model.path", "gpt2"], 1, "model.path is a setting, not a file or preset: write model.path=VALUE"),
        (["train", "--model", "gpt2", "--method", "sft", "--date", "2026-01-01"], 1, "error: data.source is missing"),
        (["train", "good.yaml", "--no-shuffle=true"], 2, "--no-shuffle takes no value"),
        (["train", "good.yaml", "--max-steps", "many"], 1, "--max-steps: training.max_steps is 'many'"),
        (["train", "good.yaml", "--training.max_steps=many"], 1, "--training.max_steps: training.max_steps is 'many'"),
        (["train", "good.yaml", "--max_steps=many"], 1, "--max_steps: training.max_steps is 'many'"),
        (["train", "good.yaml", "other.yaml"], 1, "'other.yaml' is not an override"),
        (["train", "good.yaml", "--model-index", "one"], 2, "model-index"),
        (["train", "good.yaml", "--resume", "--overwrite"], 2, "give one of them"),
        (["train", "good.yaml", "--model-index", "1"], 2, "--model-index 1: there are models 0 to 0"),
        (["config", "new", "dpoo"], 1, "there is no method dpoo; did you mean dpo?"),
        (["config", "new"], 2, "Missing argument"),
        (["confg"], 2, "there is no command confg; did you mean config?"),
        (["finetune", "--lr", "1"], 2, "there is no command finetune; write posttrain train"),
        (["grpo"], 2, "write posttrain train --method grpo"),
        (["xyzzy"], 2, "posttrain --help lists all commands"),
        (["eval", "m", "generation.temperature=0.5", "--suite", "gsm8k"], 2, "write --temperature 0.5"),
        (["train", "good.yaml", "model.lora.depth=8"], 1, "model.lora.depth is not a setting; model.lora has r, alpha"),
    ],
)
def test_mistakes_are_one_message_without_a_stack_trace(run, args, status, message):
    got, _, err = run(*args)
    assert (got, err.count("error:")) == (status, 1)
    assert message in err and "Traceback" not in err


def test_no_arguments_show_the_help(run):
    assert "train" in run()[1]
    status, out, err = run("config")
    assert (status, err) == (2, "") and "schema" in out


def test_debug_shows_the_stack_trace(run):
    status, _, err = run("config", "show", "god.yaml", "--debug")
    assert status == 1 and "Traceback" in err and err.splitlines()[-1].startswith("error: there is no file")


class OutOfMemoryError(Exception):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DataError("rows.jsonl:3: no column chosen"), 1, "error: rows.jsonl:3: no column chosen"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("two\nlines"), 1, "error: unexpected ValueError: two lines (run again with --debug"),
        (OutOfMemoryError("CUDA"), 1, "error: out of memory: use shorter prompts and completions, or fewer"),
        (MemoryError(), 1, "error: out of memory: use shorter prompts and completions, or fewer"),
    ],
)
def test_every_exception_becomes_one_message_and_a_status(capsys, error, status, message):
    def fail():
        raise error

    assert guarded(fail, debug=False) == status
    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1
    assert guarded(fail, debug=True) == status
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_in_any_command_says_so(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.rewards.file.grade_file", interrupt)
    assert run("grade", "rows.jsonl", "--reward", "math") == (130, "", "interrupted\n")


def test_notes_about_aliases_go_to_stderr(run):
    status, out, err = run("config", "show", "good.yaml", "model.lora_r=3")
    assert status == 0 and yaml.safe_load(out)["models"][0]["lora"]["r"] == 3
    assert err == "note: override model.lora_r=3: lora_r is read as lora.r\n"


def test_resume_finds_the_settings_of_the_run(tmp_path):
    checkpoint = tmp_path / "run" / "gpt2" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    with pytest.raises(RunError, match=r"no config\.yaml there or above it"):
        saved_config(checkpoint)
    (tmp_path / "run" / "config.yaml").write_text(GOOD)
    assert saved_config(checkpoint) == tmp_path / "run" / "config.yaml"
    assert saved_config(tmp_path / "run") == tmp_path / "run" / "config.yaml"


def test_a_resume_without_the_settings_file_says_which_secrets_it_lacks(run, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("posttrain.api.train_all", lambda stages, **_: written.append(stages[0].config))
    for key in ("***", "null"):
        data = f"data: {{source: rows.jsonl, chat_template_kwargs: {{user: {{api_key: '{key}'}}}}}}\n"
        (tmp_path / "config.yaml").write_text(f"model: gpt2\nmethod: sft\n{data}")
        status, _, err = run("train", "--resume", str(tmp_path))
        assert status == 0, err
        said = (
            "config.yaml has *** in place of secrets; give the settings file with --resume if the run needs "
            "data.chat_template_kwargs.user.api_key"
        )
        assert (said in err) == (key == "***")
    assert len(written) == 2


def test_help_is_quick():
    """Half a second of processor time on a quiet machine; twice that here, because tests share it. A slow machine is
    known by the imports without which there is no command line: the help takes six times as long as these alone, and
    up to nine times beside another test."""
    commands = ("-m", "posttrain", "--help"), ("-c", "import pydantic, rich, typer, yaml")
    used, imports = (min(processor_time(*command) for _ in range(2)) for command in commands)  # other tests disturb one
    print(f"posttrain --help: {used:.2f} s of processor time, imports alone {imports:.2f} s")
    assert used < max(1.0, 10 * imports)


def processor_time(*arguments: str) -> float:
    """Seconds that Python takes with these arguments."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_the_reference_in_the_docs_is_the_schema():
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert text == with_reference(text), "run: python tests/settings_reference.py docs/config.md"


def test_the_commands_and_the_file_in_the_docs_work(run, tmp_path):
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").partition("## Reference")[0]
    short = re.search(r"```yaml\n(.*?)```", text, re.S)
    assert short is not None
    (tmp_path / "dpo.yaml").write_text(short[1])
    assert load("dpo.yaml").config.training.max_steps == 500
    commands = [line.split("#")[0].split() for line in text.splitlines() if line.startswith("posttrain config")]
    assert len(commands) >= 5
    for _, *args in commands:
        status, _, err = run(*args)
        assert status == 0, (args, err)
