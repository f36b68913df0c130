"""`train --method all`: several methods from one start, each in a folder of its own, compared prompt by prompt."""

import json
import math
import statistics
from itertools import combinations

import pytest
from pages import drawn
from test_online import EXACT

from posttrain.cli import main
from posttrain.evaluation.comparing.sources import read_validation
from posttrain.runner.comparison import ComparedRun, read_finished, shared_prompts
from posttrain.runs.files import load_json
from posttrain.runs.stored_rollouts import StoredRun


@pytest.fixture(scope="module")
def settings(sums_home, tmp_path_factory):
    """Settings of sums as completions, which SFT and the online methods can take, pairs and labels not."""
    folder = tmp_path_factory.mktemp("compared")
    rows = [json.loads(line) for line in (sums_home / "train.jsonl").read_text().splitlines()]
    taught = [{**row, "completion": row["answer"]} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    file = folder / "sums.json"
    sections = {
        "name": "sums",
        "output_dir": str(folder),
        "model": str(sums_home / "model"),
        "method": {"type": "grpo", "num_generations": 4},
        "rewards": [EXACT],
        "data": {
            "source": str(folder / "rows.jsonl"),
            "template": "none",
            "max_length": 24,
            "validation": {"rows": 40},
        },
        "rollout": {"max_completion_length": 6},
        "training": {"batch_size": 16, "max_steps": 4, "learning_rate": 1e-3},
        "evaluation": {"eval_steps": 2},
        "devices": {"type": "cpu"},
    }
    file.write_text(json.dumps(sections))
    return file


def test_all_methods_that_the_data_can_serve(settings, capsys):
    """Those that need pairs or labels are skipped by name; the table has the others, best first."""
    assert main(["train", str(settings), "--method", "all"]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    root = settings.parent / "sums"
    facts = load_json(root / "comparison/comparison.json")
    names = [entry["name"] for entry in facts["methods"]]
    assert sorted(names) == ["grpo", "ppo", "reinforce_plus_plus", "rloo", "sft"]
    rewards = [entry["reward"]["value"] for entry in facts["methods"]]
    assert rewards == sorted(rewards, reverse=True)
    for name in ("dpo", "orpo", "cpo", "simpo", "kto"):
        assert f"dropped from the comparison: {name}" in err
    assert set(names) <= {said.split()[0] for said in drawn(root / "comparison/comparison.svg")}
    for name in names:
        assert name in out and (root / name / "final").is_dir()
    assert max(map(len, out.splitlines())) <= 80
    for entry in facts["methods"]:
        check_by_hand(root / entry["name"], entry, facts["start"])
    check_pairs_by_hand(root, facts["pairs"], names)
    assert "validation prompts: 40 of 40 shared" in out and facts["prompts"] == {"shared": 40, "all": 40}
    said = " ".join(out.split())
    for other in names[1:]:
        shown = f"{names[0]} is better than {other} by", f"No difference shown between {names[0]} and {other}"
        assert sum(sentence in said for sentence in shown) == 1
    page = (root / "comparison/comparison.html").read_text()
    assert page.count("<figure") >= 4 and (root / "report.html").is_file()
    assert "40 of 40 shared" in page
    assert f"{names[0]} above {names[-1]}" in page and f"{names[1]} above {names[2]}" not in page


def check_by_hand(folder, entry, start):
    with StoredRun(folder) as stored:
        sampled = stored.evaluations()
    first = {one["row"]: one["reward"] for one in sampled if one["step"] == 0}
    last = {one["row"]: one["reward"] for one in sampled if one["step"] == 4}
    assert len(first) == len(last) == 40 and set(first) == set(last)
    assert start["value"] == pytest.approx(statistics.fmean(first.values()))
    changes = [last[row] - first[row] for row in first]
    assert entry["change"]["value"] == pytest.approx(statistics.fmean(changes))
    assert entry["change"]["standard_error"] == pytest.approx(statistics.stdev(changes) / math.sqrt(40))
    assert (entry["change"]["wins"], entry["change"]["losses"]) == (
        sum(c > 0 for c in changes),
        sum(c < 0 for c in changes),
    )
    assert entry["curve"][0] == [0, pytest.approx(start["value"])] and [s for s, _ in entry["curve"]] == [0, 2, 4]


def test_prompts_that_some_methods_lack_are_counted():
    """By hand; an answer without a reward is one of them."""
    answers = {"a": (0, 1, 2, 3), "b": (1, 2, 3, 4), "c": (1, 2)}
    runs = [
        ComparedRun(None, None, [one for row in rows for one in read_validation([stored(row)])[0]])  # pyright: ignore
        for rows in answers.values()
    ]
    assert shared_prompts(runs) == (2, 5) and shared_prompts(runs[:2]) == (3, 5) and shared_prompts(runs[:1]) == (4, 4)


def stored(row):
    texts = {"prompt": "p", "completion": "c", "finish_reason": "stop"}
    return {"dataset": "validation", "row": row, "step": 0, "reward": None if row == 2 else 1.0, **texts}


def check_pairs_by_hand(root, pairs, names):
    """Every two methods, prompt by prompt; B is the one with the higher mean."""
    assert [(pair["a"], pair["b"]) for pair in pairs] == [*combinations(reversed(names), 2)]
    rewards = {}
    for name in names:
        with StoredRun(root / name) as stored:
            rewards[name] = {one["row"]: one["reward"] for one in stored.evaluations() if one["step"] == 4}
    for pair in pairs:
        changes = [rewards[pair["b"]][row] - rewards[pair["a"]][row] for row in rewards[pair["a"]]]
        assert pair["value"] == pytest.approx(statistics.fmean(changes)) and pair["value"] >= 0
        assert (pair["wins"], pair["losses"]) == (sum(c > 0 for c in changes), sum(c < 0 for c in changes))
        assert pair["p_adjusted"] >= pair["p"] and "flips" not in pair


@pytest.mark.slow
def test_going_on_with_a_comparison(settings, capsys):
    """The folder is enough: finished methods are left as they are, and the comparison is written again."""
    root = settings.parent / "again"
    assert main(["train", str(settings), "--method", "sft,rloo", "name=again"]) == 0, capsys.readouterr().err
    (root / "comparison/comparison.json").unlink()
    assert main(["train", "--resume", str(root), "--method", "sft,rloo"]) == 0, capsys.readouterr().err
    assert {entry["name"] for entry in load_json(root / "comparison/comparison.json")["methods"]} == {"sft", "rloo"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "sft,reward"], "'reward' cannot be compared"),
        (["--method", "sft,grop"], "did you mean grpo?"),
        (["--method", "sft,dpo"], "fewer than two methods"),
        (["--method", "all", "data.validation=null"], "set rewards, data.validation"),
        (["--method", "all", "rollout.save=false"], "keep rollout.save: true"),
        (["--method", "all", "data.sauce=x"], "is not a setting"),
    ],
)
def test_what_is_refused(settings, capsys, arguments, message):
    assert main(["train", str(settings), *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_run_without_rewarded_evaluations(settings, tmp_path):
    from posttrain.base.errors import RunError
    from posttrain.runs.files import save_json
    from posttrain.runs.rollouts import GIB, RolloutStore

    save_json(tmp_path / "results.json", {"steps": 1, "num_tokens": 1, "train_runtime": 1.0, "final": {}})
    (tmp_path / "metrics.jsonl").write_text("")
    RolloutStore(tmp_path, GIB, -1).close()
    with pytest.raises(RunError, match="nothing to compare"):
        read_finished("sft", tmp_path)
