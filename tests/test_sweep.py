"""`posttrain sweep`: which trials, which of them are stopped, what a kill leaves, and what the table says."""

import json
import math
import random
import shutil

import pytest
from pages import drawn
from test_compare import run_of
from test_online import EXACT

from posttrain import runner
from posttrain.base.errors import ConfigError
from posttrain.cli import main
from posttrain.config import load
from posttrain.runner import sweep as trials
from posttrain.runner.sweep import over_seeds
from posttrain.runner.trials import (
    Range,
    Sweep,
    Trial,
    is_hopeless,
    median_to_beat,
    read_space,
    read_sweep,
    short_names,
    split_values,
    trials_of,
)
from posttrain.runs.files import load_json, save_json
from posttrain.runs.metrics import read_metrics

RATE = "training.learning_rate"


@pytest.fixture(scope="module")
def home(sums_home, tmp_path_factory):
    """A folder with settings for SFT on sums: each run takes three steps and evaluates after every one."""
    folder = tmp_path_factory.mktemp("sweeps")
    rows = [json.loads(line) for line in (sums_home / "train.jsonl").read_text().splitlines()[:60]]
    (folder / "rows.jsonl").write_text("".join(json.dumps({**row, "completion": row["answer"]}) + "\n" for row in rows))
    sections = {
        "output_dir": str(folder / "runs"),
        "model": str(sums_home / "model"),
        "method": "sft",
        "data": {
            "source": str(folder / "rows.jsonl"), "template": "none", "max_length": 24, "validation": {"rows": 20},
        },
        "training": {"batch_size": 8, "max_steps": 3, "lr_scheduler_type": "constant", "warmup_steps": 0},
        "evaluation": {"eval_steps": 1},
        "devices": {"type": "cpu"},
    }  # fmt: skip
    (folder / "sums.json").write_text(json.dumps(sections))
    return folder


def swept(home, name, *arguments):
    """Run a sweep; returns its exit status and folder."""
    return main(["sweep", str(home / "sums.json"), f"name={name}", *arguments]), home / "runs" / name


# --- which trials ---------------------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_in_order():
    space = read_space(["a.b=1,2", "seed=0..2", "c.d=5", "e={x: [1,2], y: 3},null"])
    assert space.fixed == ("c.d=5",)
    found = space.trials(None, 0)
    assert len(found) == 12 and found[:3] == [
        {"a.b": "1", "seed": "0", "e": "{x: [1,2], y: 3}"},
        {"a.b": "1", "seed": "0", "e": "null"},
        {"a.b": "1", "seed": "1", "e": "{x: [1,2], y: 3}"},
    ]
    names = [trial.name for trial in trials_of(found)]
    assert names[0] == "01-b-1-seed-0-e-x-1-2-y-3" and len(set(names)) == 12
    assert short_names(["a.b", "c.b", "d"]) == {"a.b": "a.b", "c.b": "c.b", "d": "d"}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1, 2", ["1", "2"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("'a,b',\"c, d\"", ["'a,b'", '"c, d"']),
        ("don't,x", ["don't", "x"]),
        ("{a: ']', b: 1},2", ["{a: ']', b: 1}", "2"]),
        ("", [""]),
    ],
)
def test_values_are_split_outside_of_brackets_and_quotes(text, values):
    assert split_values(text) == values


def test_random_trials_differ_and_are_the_same_every_time():
    space = read_space([f"{RATE}=1e-6..1e-4", "model.lora.r=4..64", "method.beta=0.1,0.5"])
    found = space.trials(200, 3)
    assert found == space.trials(200, 3) != space.trials(200, 4)
    assert len({tuple(one.items()) for one in found}) == 200
    rates = [float(one[RATE]) for one in found]
    assert all(1e-6 <= rate <= 1e-4 for rate in rates) and 70 < sum(rate < 1e-5 for rate in rates) < 130
    ranks = [int(one["model.lora.r"]) for one in found]
    assert min(ranks) == 4 and max(ranks) >= 60 and 60 < sum(rank < 16 for rank in ranks) < 140
    assert sorted(read_space(["seed=0..4"]).trials(5, 0), key=str) == [{"seed": str(n)} for n in range(5)]
    source = random.Random(0)
    assert all(-1 <= float(Range(-1, 1, False).sample(source)) <= 1 for _ in range(100))


@pytest.mark.parametrize(
    ("overrides", "at_random", "message"),
    [
        (["a=1e-4..1e-6"], 3, "the range is empty: 1e-4 is not below 1e-6"),
        (["a=1..1"], None, "the range is empty"),
        (["a=1e-6..1e-4"], None, "add --random N"),
        (["a=1.2.3..4"], 3, "a range has two numbers"),
        (["a=1..1e999"], 3, "not finite"),
        (["a=1,2", "b=1,2"], 5, "only 4 combinations"),
        (["a=1,,2"], None, "a value is empty"),
        (["a=1,1"], None, "a value is given twice"),
        (["a=1,2", "a=3"], None, "a is given twice"),
        (["a=0..99999"], None, "100,000 trials are more than 10,000"),
        (["a=1.0..1.01"], 30, "different trials were found"),
    ],
)
def test_spaces_that_are_refused(overrides, at_random, message):
    with pytest.raises(ConfigError, match=message):
        read_space(overrides).trials(at_random, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.leraning_rate=1,2"], "did you mean training.learning_rate?"),
        ([f"{RATE}=1e-3,abc"], "learning_rate is 'abc'"),
        ([f"{RATE}=1e-3"], "nothing is swept"),
        ([f"{RATE}=1e-3,1e-4", "--learning-rate", "1"], "also given as a flag"),
        (["name=a,b"], "name cannot be swept"),
        ([f"{RATE}=1e-3,1e-4", "--metric", "loss"], "give a metric of the evaluation"),
        ([f"{RATE}=1e-3,1e-4", "data.validation=null"], "set data.validation"),
        ([f"{RATE}=1e-3,1e-4", "--resume", "--overwrite"], "give one of them"),
        (
            [f"{RATE}=1e-3,1e-4", "--metric", "eval_reward"],
            "--metric eval_reward: the evaluation of this run measures only",
        ),
    ],
)
def test_sweeps_that_are_refused(home, capsys, arguments, message):
    assert main(["sweep", str(home / "sums.json"), "--output-dir", str(home / "refused"), *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_dry_run_lists_the_trials(home, capsys):
    assert swept(home, "dry", f"{RATE}=1e-3,1e-4", "seed=0..1", "--dry-run")[0] == 0
    out = capsys.readouterr().out
    assert "04-learning_rate-1e-4-seed-1" in out and "4 trials in" in out and "stopping: none" in out
    assert "ranked by eval_loss (lower is better)" in out and not (home / "runs/dry").exists()


# --- the median rule ------------------------------------------------------------------------------------------------


def test_the_median_by_hand():
    """Means up to step 2 are 2, 4 and 9; the fourth trial ended before it, and step 0 does not count."""
    earlier = [[(0, 99), (1, 3), (2, 1), (3, 50)], [(1, 4), (2, 4)], [(1, 8), (2, 10)], [(1, 0)]]
    assert median_to_beat(2, earlier, True) == 4
    assert median_to_beat(1, earlier, True) == 3.5 and median_to_beat(3, earlier, True) is None
    assert is_hopeless([(0, 1), (1, 6), (2, 5)], earlier, True)
    assert not is_hopeless([(1, 6), (2, 4)], earlier, True)  # not worse than the median
    assert not is_hopeless([(1, 3), (2, 99)], earlier, True)  # its best counts
    assert not is_hopeless([(0, 5), (1, 99)], earlier, True)  # one evaluation may be bad luck
    assert is_hopeless([(1, 3.9), (2, None)], earlier, False) and not is_hopeless([(1, 4.1), (2, 0)], earlier, False)
    assert is_hopeless([(1, None), (2, None)], earlier, True)
    assert median_to_beat(2, [[(2, None)], *earlier[:2]], True) == 4
    assert math.isinf(median_to_beat(2, [[(2, None)]] * 2 + earlier[:1], True))


# --- running --------------------------------------------------------------------------------------------------------


def test_a_sweep_ranks_its_trials_and_goes_on(home, capsys, monkeypatch):
    """Values are those of the runs; with --resume nothing is trained again, and further values are added; Ctrl-C keeps
    what is finished, --overwrite nothing."""
    status, root = swept(home, "rates", f"{RATE}=1e-3,1e-9")
    out, err = capsys.readouterr()
    assert status == 0, err
    found = read_sweep(root)
    for trial in found.trials:
        lines = read_metrics(root / trial.name)
        losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
        assert (trial.state, trial.value, trial.steps) == ("finished", losses[-1], 3)
        assert trial.best == min(losses) and trial.best_step == losses.index(min(losses))
    assert found.best is found.trials[0] and f"best: {root / found.best.name}" in out.replace("\n", "")
    assert out.index(" 01 ") < out.index(" 02 ") and max(map(len, out.splitlines()[:-1])) <= 80
    texts = drawn(root / "sweep.svg")
    assert {"1e-3", "1e-9"} <= set(texts) and any("by learning_rate" in said for said in texts)
    assert main(["runs", "show", str(root / found.best.name)]) == 0
    stamp = (root / found.best.name / "results.json").stat().st_mtime_ns
    assert swept(home, "rates", f"{RATE}=1e-2,1e-3,1e-9", "--resume")[0] == 0
    again = read_sweep(root)
    assert [trial.name for trial in again.trials[:2]] == [trial.name for trial in found.trials]
    assert again.trials[2].name == "03-learning_rate-1e-2" and again.trials[2].state == "finished"
    assert (root / found.best.name / "results.json").stat().st_mtime_ns == stamp
    capsys.readouterr()
    for arguments, message in (
        ([f"{RATE}=1e-3,1e-9"], "already has a sweep"),
        ([f"{RATE}=1e-3,1e-5", "--resume"], "do not include: 02-learning_rate-1e-9, 03-learning_rate-1e-2"),
        ([f"{RATE}=1e-2,1e-3,1e-9", "--resume", "--stopping", "none"], "with --stopping median, not none"),
        ([f"{RATE}=1e-2,1e-3,1e-9", "--resume", "training.batch_size=4"], "was made with different settings"),
    ):
        assert swept(home, "rates", *arguments)[0] == 1
        assert message in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(trials.runner, "train", interrupted)
    assert swept(home, "rates", f"{RATE}=1e-2,1e-3,1e-9,1e-4,1e-5", "--resume")[0] == 130
    out, err = capsys.readouterr()
    assert "resume with --resume: finished trials" in err and f"best: {root / found.best.name}" in out.replace("\n", "")
    states = [trial.state for trial in read_sweep(root).trials]
    assert states == ["finished"] * 3 + ["interrupted", "waiting"]
    assert swept(home, "rates", f"{RATE}=1e-3,1e-4", "--overwrite")[0] == 130
    assert [trial.state for trial in read_sweep(root).trials] == ["interrupted", "waiting"]
    assert not list(root.glob("*/run.json"))


def interrupted(config, **more):
    raise KeyboardInterrupt


def test_a_watcher_stops_a_bad_trial(tmp_path):
    """By the evaluations in its folder and the one that it sees; the step is in sweep.json at once."""
    (tmp_path / "04").mkdir()
    (tmp_path / "04/metrics.jsonl").write_text('{"step": 1, "eval_loss": 8.0}\n{"step": 2, "eval_loss": 0.0}\n')
    earlier = [[(1, 3.0), (2, 1.0)], [(1, 4.0), (2, 4.0)], [(1, 8.0), (2, 10.0)]]
    for rule, loss, stop_at in (("median", 9.0, 2), ("median", 3.9, None), ("none", 9.0, None)):
        trial = Trial("04", {RATE: "1e-9"})
        watcher = trials.Watcher(Sweep(tmp_path, "eval_loss", True, rule, [trial]), trial, earlier)
        watcher.look(2, {"eval_loss": loss})  # after a resume at step 1: the line of step 2 is of the lost time
        assert watcher.stop_at == trial.stop_at == stop_at
    assert not (tmp_path / "sweep.json").exists() or read_sweep(tmp_path).trials[0].stop_at == 2


@pytest.mark.slow
def test_a_bad_trial_is_stopped_early(home, capsys):
    """The last rate does not learn: it ends after its second evaluation, with a final model."""
    status, root = swept(home, "median", f"{RATE}=1e-3,1.2e-3,1.4e-3,1e-9")
    assert status == 0, capsys.readouterr().err
    *good, bad = read_sweep(root).trials
    assert [trial.state for trial in good] == ["finished"] * 3
    assert (bad.state, bad.steps, bad.stop_at) == ("stopped early", 2, 2) and "median" in bad.reason
    assert load_json(root / bad.name / "run.json")["state"] == "finished" and (root / bad.name / "final").is_dir()
    assert read_sweep(root).ranked()[-1].name == bad.name


@pytest.mark.slow
def test_a_killed_sweep_goes_on_to_the_same_end(home, power_cut, monkeypatch):
    """Cut off after the first step of the second trial, and again before its result is recorded: every trial equals an
    ordinary run of its settings, bit for bit."""
    arguments = (f"{RATE}=1e-3,2e-3", "checkpoint.save_steps=1")
    train = runner.train

    def cut(config, **more):
        if config.name.startswith("01"):
            return train(config, **more)
        with power_cut(step=1):
            train(config, **more)
        raise SystemExit(9)

    for name, broken in (("runner.train", cut), ("_collect", killed)):
        with monkeypatch.context() as patch:
            patch.setattr(f"posttrain.runner.sweep.{name}", broken)
            with pytest.raises(SystemExit):
                swept(home, "cut", *arguments, "--resume")
    assert swept(home, "cut", *arguments, "--resume")[0] == 0
    for trial in read_sweep(home / "runs/cut").trials:
        overrides = [f"name={trial.name}", f"{RATE}={trial.settings[RATE]}", "checkpoint.save_steps=1"]
        assert runner.train(load(home / "sums.json", overrides).config) == 0
        alone, ours = home / "runs" / trial.name, home / "runs/cut" / trial.name
        assert (alone / "final/model.safetensors").read_bytes() == (ours / "final/model.safetensors").read_bytes()
        assert trial.value == read_metrics(alone)[-1]["eval_loss"] and trial.state == "finished"


def killed(sweep, trial):
    raise SystemExit(9)


def test_a_trial_that_fails_is_told_and_the_others_run(home, sums_home, capsys):
    models = f"model={home / 'nowhere'},{sums_home / 'model'}"
    status, root = swept(home, "models", models, "--max-steps", "1")
    assert status == 1 and "1 of 2 trials failed: 01" in capsys.readouterr().err
    found = read_sweep(root)
    assert [trial.state for trial in found.trials] == ["failed", "finished"]
    assert "nowhere" in found.trials[0].reason
    status, root = swept(home, "none", f"model={home / 'nowhere'}", "seed=0..3")
    assert status == 1 and "the first 2 trials failed for the same reason" in capsys.readouterr().err
    assert [trial.state for trial in read_sweep(root).trials] == ["failed", "failed", "waiting", "waiting"]


def test_the_spread_over_seeds(tmp_path):
    values = {("a", "0"): 1.0, ("a", "1"): 3.0, ("b", "0"): 1.5, ("b", "1"): 1.7, ("c", "0"): 0.1}
    rows = [
        Trial(f"{n}", {"x": x, "seed": seed}, "finished", value) for n, ((x, seed), value) in enumerate(values.items())
    ]
    rows[-1].state = "stopped early"
    shown = over_seeds(Sweep(tmp_path, "eval_loss", True, "none", rows))
    assert [list(column.cells) for column in shown.columns] == [["b", "a"], ["1.6", "2"], ["0.14", "1.4"], ["2", "2"]]


def test_finished_trials_are_compared_item_by_item(tmp_path, capsys, monkeypatch):
    """Settings against the best ones, with the seeds of each as its runs. Without rewards there is no comparison, but
    a ranking."""
    rows = []
    for rate, low in (("1e-5", 0.0), ("1e-3", 0.5)):
        for seed in range(2):
            name, rewards = f"0{len(rows)}", [low + 0.1 * (i % 3) + 0.01 * seed for i in range(30)]
            run_of(tmp_path / name, [rewards], seed, steps=[4])
            rows.append(Trial(name, {RATE: rate, "seed": str(seed)}, "finished", sum(rewards) / 30, steps=4))
    found = Sweep(tmp_path, "eval_reward", False, "none", rows)
    trials._report(found)
    out = " ".join(capsys.readouterr().out.split())
    facts = load_json(tmp_path / "comparison/compare.json")
    assert [(side["name"], side["seeds"]) for side in facts["sides"]] == [("1e-3", [0, 1]), ("1e-5", [0, 1])]
    assert "by learning_rate, the best settings first" in out and "1e-3 is better than 1e-5 by 0.500" in out
    for trial in rows:
        shutil.rmtree(tmp_path / trial.name)
        run_of(tmp_path / trial.name, [[None] * 30], steps=[4])
    trials._report(found)
    assert f"best: {tmp_path / '03'}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.slow
def test_rewarded_runs_are_compared_item_by_item(home, sums_home, capsys):
    """The same with runs of GRPO."""
    settings = json.loads((home / "sums.json").read_text())
    settings |= {"method": {"type": "grpo", "num_generations": 2}, "rewards": [EXACT], "name": "grpo"}
    settings |= {"rollout": {"max_completion_length": 6}}
    (home / "grpo.json").write_text(json.dumps(settings))
    arguments = [f"{RATE}=1e-5,1e-9", "seed=0..1", "--max-steps", "1"]
    assert main(["sweep", str(home / "grpo.json"), *arguments]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    root = home / "runs/grpo"
    facts = load_json(root / "comparison/compare.json")
    assert read_sweep(root).metric == "eval_reward" and (root / "comparison/compare.html").is_file()
    assert [side["seeds"] for side in facts["sides"]] == [[0, 1], [0, 1]]
    assert "by learning_rate, the best settings first" in out and "no difference" in out.lower()


def test_folders_that_are_no_sweeps(home, tmp_path, capsys):
    (home / "runs/other").mkdir(parents=True, exist_ok=True)
    (home / "runs/other/notes.txt").write_text("mine")
    assert swept(home, "other", f"{RATE}=1e-3,2e-3", "--overwrite")[0] == 1
    assert "is not empty and has no sweep.json" in capsys.readouterr().err
    (home / "runs/other/run.json").write_text("{}")
    assert swept(home, "other", f"{RATE}=1e-3,2e-3")[0] == 1
    assert "is a run, not a sweep" in capsys.readouterr().err
    (home / "runs/broken").mkdir()
    save_json(home / "runs/broken/sweep.json", {"format": 1})
    assert swept(home, "broken", f"{RATE}=1e-3,2e-3", "--resume")[0] == 1
    assert "sweep.json is damaged" in capsys.readouterr().err
