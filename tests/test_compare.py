"""`posttrain compare`: evaluations, runs and files, item by item."""

import json
import math
import shutil
import time
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from pages import drawn
from test_judge import server  # noqa: F401  a fixture
from test_online import EXACT

from posttrain.cli import main
from posttrain.config.options import CompareOptions
from posttrain.evaluation.comparing.differences import compare, holm
from posttrain.evaluation.comparing.sources import make_sides, read_source, split_name
from posttrain.evaluation.records import Answer
from posttrain.reports.page import SCRIPT
from posttrain.runs.files import load_json, save_json, save_rows
from posttrain.runs.rollouts import GIB, RolloutStore, StoredEvaluation

PLAIN = Answer(
    suite="sums",
    item="0",
    sample=0,
    prompt="",
    completion="",
    verdict="wrong",
    score=0.0,
    tokens=1,
    finish_reason="stop",
)


def answered(scores, **changes):
    """Answers of items 0, 1 … with these scores; a list has several samples, None is not graded."""
    found = []
    for item, several in enumerate(scores):
        for sample, score in enumerate(several if isinstance(several, list | tuple) else [several]):
            verdict = "ungraded" if score is None else {1: "correct", 0: "wrong"}.get(score, "scored")
            one = replace(PLAIN, item=str(item), sample=sample, score=score, verdict=verdict)
            texts = {"prompt": f"{item} + 1", "gold": str(item + 1), "completion": f"it is {score}", "extracted": "7"}
            found.append(replace(one, **texts, **changes))
    return found


def evaluation(folder, answers, name=None, count=None, **facts):
    """An evaluation folder as `posttrain eval` leaves it, with one suite."""
    save_rows(folder / "answers.jsonl", map(asdict, answers))
    counts = {"suite": answers[0].suite, "metric": "accuracy", "answers": count or len(answers)}
    suite = {**counts, "sampling": {"temperature": 0.0, "seed": 0}, **facts}
    model = {"name": name or folder.name, "path": "", "weights": None}
    save_json(folder / "summary.json", {"format": 1, "model": model, "suites": {answers[0].suite: suite}})
    return str(folder)


def compared(folder, *sides, flags=()):
    """Run the command; returns compare.json."""
    assert main(["compare", *map(str, sides), "-o", str(folder / "out"), *flags]) == 0
    return load_json(folder / "out/compare.json")


def only(facts):
    """The only difference of the only suite."""
    (suite,) = facts["suites"].values()
    (difference,) = suite["differences"]
    return difference


@pytest.fixture(scope="module")
def recorded(shared, tmp_path_factory):
    """Evaluation folders of OpenAI's recorded solutions of GSM8K's test set."""
    rows = [json.loads(line) for line in (shared / "data/gsm8k/example_model_solutions.jsonl").open()]
    home = tmp_path_factory.mktemp("recorded")
    for model in ("6b_finetuning", "6b_verification", "175b_finetuning"):
        answers = []
        for item, row in enumerate(rows):
            right, solution = row[model]["is_correct"], row[model]["solution"]
            verdict = "correct" if right else "wrong"
            facts = {"item": str(item), "prompt": row["question"], "gold": row["ground_truth"].rpartition("A: ")[2]}
            facts |= {"completion": solution, "score": float(right), "verdict": verdict}
            answers.append(replace(PLAIN, suite="gsm8k", **facts))
        evaluation(home / model, answers)
    return home, rows


def test_recorded_solutions(recorded, tmp_path, capsys):
    """GSM8K's recorded solutions: every number by hand, every flipped item with both texts, in 80 columns."""
    home, rows = recorded
    facts = compared(tmp_path, home / "6b_verification", home / "175b_finetuning")
    out, one = capsys.readouterr().out, only(facts)
    said = " ".join(out.split())
    pairs = Counter((row["6b_verification"]["is_correct"], row["175b_finetuning"]["is_correct"]) for row in rows)
    won, lost = pairs[False, True], pairs[True, False]
    assert (one["wins"], one["losses"], one["ties"]) == (won, lost, 1319 - won - lost)
    assert one["value"] == pytest.approx((won - lost) / 1319)
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1)) / 2 ** (won + lost)
    assert one["test"] == "exact McNemar" and one["p"] == pytest.approx(2 * tail)
    values = facts["suites"]["gsm8k"]["values"]
    assert [round(values[name]["value"], 3) for name in values] == [0.390, 0.347]
    better = {row["item"] for row in one["flips"] if row["b"]["score"] > row["a"]["score"]}
    assert better == {
        str(item)
        for item, row in enumerate(rows)
        if row["175b_finetuning"]["is_correct"] and not row["6b_verification"]["is_correct"]
    }
    (flip,) = [row for row in one["flips"] if row["item"] == min(better, key=int)]
    row = rows[int(flip["item"])]
    assert flip["prompt"] == row["question"] and flip["a"]["completion"] == row["6b_verification"]["solution"]
    assert one["better"] == "6b_verification"
    assert "6b_verification is better than 175b_finetuning by 0.043 (0.015 to 0.071; p = 0.0032)." in said
    assert max(map(len, out.partition("written")[0].splitlines())) <= 80
    page = (tmp_path / "out/compare.html").read_text()
    assert "6b_verification above 175b_finetuning" in page and row["question"].split("\n")[0][:20] in page
    texts = drawn(tmp_path / "out/compare.svg")
    assert {"6b_verification", "175b_finetuning", "175b_finetuning − 6b_verification"} <= set(texts)


def test_three_sides_and_holm(recorded, tmp_path, capsys):
    home, _ = recorded
    sides = [home / name for name in ("6b_finetuning", "6b_verification", "175b_finetuning")]
    facts = compared(tmp_path, *sides, flags=["--all-pairs"])
    differences = facts["suites"]["gsm8k"]["differences"]
    assert [(one["a"], one["b"]) for one in differences] == [
        ("6b_finetuning", "6b_verification"),
        ("6b_finetuning", "175b_finetuning"),
        ("6b_verification", "175b_finetuning"),
    ]
    assert [one["p_adjusted"] for one in differences] == pytest.approx(holm([one["p"] for one in differences]))
    assert "adjusted for their number" in capsys.readouterr().out
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([0.7, 0.6]) == [1.0, 1.0]


def test_no_difference_is_said_plainly(tmp_path, capsys):
    random = np.random.default_rng(0)
    one, other = (random.integers(0, 2, 200).astype(float) for _ in range(2))
    facts = compared(tmp_path, evaluation(tmp_path / "a", answered(one)), evaluation(tmp_path / "b", answered(other)))
    difference = only(facts)
    assert difference["better"] is None and difference["low"] < 0 < difference["high"]
    found = " ".join(capsys.readouterr().out.split())
    assert "No difference shown between b and a" in found
    assert f"A difference of {difference['smallest']:.3f} would have been detected in 80 % of cases." in found
    same = compared(tmp_path, tmp_path / "a", evaluation(tmp_path / "copy", answered(one)))
    assert only(same)["p"] == 1 and only(same)["flips"] == [] and only(same)["low"] < 0 < only(same)["high"]


def test_several_samples_are_compared_by_their_means(tmp_path):
    """Two samples of each item: a bootstrap over items; the flip shows the better side's best and the other's worst."""
    a = evaluation(tmp_path / "a", answered([(0, 0), (1, 0), (1, 1), (0, 1)] * 10))
    b = evaluation(tmp_path / "b", answered([(1, 0), (1, 1), (1, 1), (0, None)] * 10))
    facts = compared(tmp_path, a, b)
    one = only(facts)
    assert one["test"] == "paired bootstrap" and (one["wins"], one["losses"], one["ties"]) == (20, 10, 10)
    assert one["value"] == pytest.approx((0.5 + 0.5 + 0 - 0.5) / 4)
    assert facts["suites"]["sums"]["values"]["b"]["ungraded"] == 10
    assert facts["suites"]["sums"]["values"]["b"]["value"] == pytest.approx(5 / 7)
    (flip,) = [row for row in one["flips"] if row["item"] == "0"]
    assert (flip["a"]["completion"], flip["b"]["completion"]) == ("it is 0", "it is 1")


def run_of(folder, by_step, seed=0, prompt="q", steps=(0, 4), **settings):
    """A run folder with the validation rewards of each of its steps."""
    folder.mkdir(parents=True)
    save_json(folder / "run.json", {"format": 1, "state": "finished"})
    settings = {"name": folder.name, "seed": seed, "method": {"type": "grpo"}, **settings}
    (folder / "config.yaml").write_text(json.dumps(settings))
    store = RolloutStore(folder, GIB, -1)
    for step, values in zip(steps, by_step, strict=True):
        rows = [StoredEvaluation(i, f"{prompt} {i}", f"says {v}", v, "stop", {}, [1]) for i, v in enumerate(values)]
        store.add_evaluation(step, "validation", rows)
    store.close()
    return str(folder)


def test_a_run_before_and_after(tmp_path, capsys):
    random = np.random.default_rng(1)
    before = random.normal(0, 1, 60)
    run = run_of(tmp_path / "grpo", [before, before + random.normal(0.5, 0.5, 60)])
    one = only(compared(tmp_path, f"{run}@0", run))
    assert one["a"] == "grpo@0" and one["better"] == "grpo" and one["low"] > 0
    assert main(["compare", f"{run}@3", run]) == 1
    assert "has no evaluation at step 3: it has 0, 4" in capsys.readouterr().err
    twice = run_of(tmp_path / "twice", [before, before], rewards=[{"type": "math", "weight": 2.0, "name": None}])
    compared(tmp_path, run, twice)
    assert "rewards differs: grpo none, twice math (weight 2.0)" in " ".join(capsys.readouterr().out.split())


def test_which_of_a_runs_models(tmp_path, capsys):
    """Without an evaluation of final/, the only one that there is; of several none is chosen silently."""
    run = tmp_path / "runs/x"
    run_of(run, [[0.5] * 4], steps=[4])
    (run / "rollouts.sqlite").unlink()
    evaluation(run / "evaluation/checkpoint-10", answered([1.0, 0.0]))
    assert read_source(str(run)).name == "x/checkpoint-10"
    evaluation(run / "evaluation/checkpoint-20", answered([1.0, 1.0]))
    assert main(["compare", str(run), evaluation(tmp_path / "b", answered([1.0, 1.0]))]) == 1
    error = capsys.readouterr().err
    assert "has evaluations of checkpoint-10, checkpoint-20, but not of its final model" in error
    assert "runs/x/evaluation/checkpoint-20" in error
    evaluation(run / "evaluation/final", answered([0.0, 0.0]))
    found = read_source(str(run))
    assert found.name == "x" and [one.score for one in found.suites["sums"].answers] == [0.0, 0.0]


def test_seeds_set_a_floor(tmp_path, capsys):
    """A difference that the items show, but seeds alone make, is not shown; runs that differ by the seed are a side."""
    random = np.random.default_rng(2)
    hard = random.normal(0, 1, 200)
    made = {}
    for method, shifts in (("sft", (0.0, 0.4)), ("grpo", (0.3, 0.6))):
        for seed, shift in enumerate(shifts):
            scores = hard + shift + random.normal(0, 0.1, 200)
            folder = tmp_path / f"{method}-{seed}"
            made[method, seed] = run_of(folder, [scores], seed, steps=[4], method={"type": method})
    facts = compared(tmp_path, *made.values())
    one, suite = only(facts), next(iter(facts["suites"].values()))
    assert [side["name"] for side in facts["sides"]] == ["sft (2 seeds)", "grpo (2 seeds)"]
    assert [side["seeds"] for side in facts["sides"]] == [[0, 1], [0, 1]]
    assert one["p"] < 0.001 and one["low"] > 0 and one["better"] is None
    runs = [suite["values"][side["name"]]["runs"] for side in facts["sides"]]
    pooled = math.sqrt(sum(np.var(values, ddof=1) for values in runs) / 2)
    assert suite["seeds"]["deviation"] == pytest.approx(pooled)
    assert one["seed_floor"] == pytest.approx(4.302653 * pooled, rel=1e-5)  # t of 2, times sqrt(1/2 + 1/2)
    assert f"Seeds alone may cause up to {one['seed_floor']:.3f}." in " ".join(capsys.readouterr().out.split())
    named = [f"old={made['sft', 0]}", f"old={made['sft', 1]}", f"new={made['grpo', 0]}"]
    assert [side["name"] for side in compared(tmp_path, *named)["sides"]] == ["old", "new"]
    two = compared(tmp_path, made["sft", 0], made["sft", 1])  # seeds alone: each is a side
    assert [side["name"] for side in two["sides"]] == ["sft-0", "sft-1"]
    assert two["suites"]["reward on validation"]["seeds"] is None
    assert main(["compare", named[0], named[1]]) == 1 and "only one side" in capsys.readouterr().err


def test_files_of_other_commands(tmp_path, capsys):
    """Pairs of `posttrain score` by two reward models; rows of `posttrain grade`."""
    random = np.random.default_rng(3)
    for name, skill in (("small", 0.2), ("large", 1.5)):
        rows = []
        for i in range(300):
            rewards = {"chosen_reward": random.normal(skill), "rejected_reward": random.normal()}
            rows.append({"prompt": f"q{i}", "chosen": "yes", "rejected": "no", **rewards})
        save_rows(tmp_path / f"{name}.scored.jsonl", [*rows, {"error": "no pair"}])
    facts = compared(tmp_path, tmp_path / "small.scored.jsonl", tmp_path / "large.scored.jsonl")
    values = facts["suites"]["pairs"]["values"]
    right = [json.loads(line) for line in (tmp_path / "large.scored.jsonl").read_text().splitlines()][:300]
    assert values["large"]["value"] == np.mean([row["chosen_reward"] > row["rejected_reward"] for row in right])
    assert only(facts)["better"] == "large" and only(facts)["not_compared"] == {"not graded in both": 1}
    for name, score in (("a", 1.0), ("b", 0.0)):
        row = {"problem": "1 + 1", "completion": "2", "verdict": "correct", "score": score}
        save_rows(tmp_path / f"{name}.jsonl", [row] * 20)
    graded = compared(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert only(graded)["better"] == "a" and only(graded)["losses"] == 20
    save_rows(tmp_path / "other.jsonl", [{"prompt": "hello"}])
    assert main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "other.jsonl")]) == 1
    assert "has nothing to compare" in capsys.readouterr().err


def test_items_that_are_not_the_same(tmp_path, capsys):
    """Common items are compared, the rest counted; another question is no match, another template is a warning."""
    ours = answered([1.0] * 30 + [0.0] * 10)
    theirs = answered([0.0] * 30 + [1.0] * 10 + [1.0] * 5)[3:]
    theirs[1] = replace(theirs[1], prompt="User: 4 + 1")
    theirs[2] = replace(theirs[2], score=None, verdict="crashed")
    theirs[3] = replace(theirs[3], prompt="what is this?", gold=None)
    a = evaluation(tmp_path / "a", ours)
    b = evaluation(tmp_path / "b", theirs, sampling={"temperature": 1.0, "seed": 1})
    one = only(compared(tmp_path, a, b))
    assert one["items"] == 35 and one["other_prompts"] == 1
    left = {"only in A": 3, "only in B": 5, "another question under the same id": 1, "not graded in B": 1}
    assert one["not_compared"] == left
    out = " ".join(capsys.readouterr().out.split())
    for said in (
        "1 prompt of b and a differ",
        "temperature differs: a 0.0, b 1.0",
        "compared on 35 items; not compared: 1 another question under the same id, 3 only in A, 5 only in B",
        "b: 1 answer not graded",
    ):
        assert said in out
    assert "seed differs" not in out
    assert only(compared(tmp_path, a, b, flags=["--by-id"]))["items"] == 36
    theirs[0] = replace(theirs[0], prompt="another", gold="99")  # other rows: then an equal answer proves nothing
    other = only(compared(tmp_path, a, evaluation(tmp_path / "rows", theirs)))
    assert other["items"] == 33 and other["not_compared"]["another question under the same id"] == 3
    strange = evaluation(tmp_path / "c", [replace(one, prompt="?", gold=None) for one in answered([1.0] * 5)])
    assert main(["compare", a, strange]) == 1
    error = capsys.readouterr().err
    assert "no graded item in common (5 another question under the same id, 35 only in A)" in error
    assert "--by-id" in error


def test_other_questions_with_the_answers_of_these(tmp_path, capsys):
    """A quarter of other questions has the same letter; two seeds of one side may have read other rows, too."""
    letters = [[replace(one, prompt=f"{name} {i}", gold="ABCD"[(i * i + 3 * (name == "v")) % 4])
                for i, one in enumerate(answered([1.0] * 40))] for name in "uv"]  # fmt: skip
    u, v = (evaluation(tmp_path / name, answers) for name, answers in zip("uv", letters, strict=True))
    assert main(["compare", u, v]) == 1
    assert "no graded item in common (40 another question under the same id)" in capsys.readouterr().err
    a, b = (evaluation(tmp_path / name, answered([score] * 40)) for name, score in (("a", 1.0), ("b", 0.0)))
    assert main(["compare", f"one={a}", f"one={u}", f"two={b}"]) == 1
    assert "40 another question under the same id" in capsys.readouterr().err
    for name, word in (("one", "yes"), ("two", "no")):
        pair = {"chosen": word, "rejected": "?", "chosen_reward": 1.0, "rejected_reward": 0.0}
        save_rows(tmp_path / f"{name}.jsonl", [pair] * 9)
    assert main(["compare", str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]) == 1
    assert "9 another question under the same id" in capsys.readouterr().err


def test_models_are_evaluated_first(shared, sums_home, tmp_path, monkeypatch, capsys):
    """Two models of different tokenizers on a suite; the second time their evaluations are there."""
    monkeypatch.chdir(tmp_path)
    save_rows(tmp_path / "rows.jsonl", [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(8)])
    facts = {"name": "few", "source": "rows.jsonl", "rule": "math", "max_completion_length": 4, "template": "none"}
    save_json(tmp_path / "few.yaml", facts)
    models = shared / "models/stories260K", sums_home / "model"
    for _ in range(2):
        found = compared(tmp_path, *models, flags=["--suite", "few.yaml", "--device", "cpu"])
        assert [side["paths"] for side in found["sides"]] == [["evaluations/stories260K"], ["evaluations/model"]]
        assert only(found)["items"] == 8 and list(found["suites"]) == ["few"]
    assert main(["compare", "evaluations/model", "evaluations/stories260K", "--suite", "gsm8k"]) == 1
    assert "no scored suite that two of these have in common" in capsys.readouterr().err
    for arguments, message in (
        ([*models, "--max-rows", "3"], "--max-rows applies to the evaluation of models"),
        ([*models, "--suite", "gsm9k"], "did you mean gsm8k"),
        ([f"{models[0]}@3", models[1], "--suite", "few.yaml"], "to evaluate a checkpoint, give its folder"),
        ([models[0], tmp_path / "b/stories260K", "--suite", "few.yaml"], "would be evaluated in the same folder"),
        (models, "has nothing to compare: no evaluation (posttrain eval, or --suite, makes one)"),
        (["no/model", models[1]], "a model of the hub needs suites to compare on (--suite)"),
    ):
        (tmp_path / "b").mkdir(exist_ok=True)
        if not (tmp_path / "b/stories260K").exists():
            shutil.copytree(models[0], tmp_path / "b/stories260K")
        assert main(["compare", *map(str, arguments)]) != 0
        assert message in capsys.readouterr().err


def test_a_judge_in_both_orders(server, tmp_path, capsys):  # noqa: F811
    """A judge that prefers the longer completion, and of equally long ones the first: that is its position bias."""

    def answer(body):
        question = body["messages"][-1]["content"]
        a, b = (question.partition(f"assistant {x}'s answer]\n")[2].partition("\n[End")[0] for x in "AB")
        return "[[A]]" if len(a) >= len(b) else "[[B]]"

    server.answer = answer
    settings = f"{{base_url: 'http://127.0.0.1:{server.server_port}/v1', model: m, cache: {tmp_path / 'cache'}}}"
    ours = [{"prompt": f"q{i}", "completions": [{"text": f"answer {i:02}"}, {"text": "not judged"}]} for i in range(30)]
    theirs = [{"prompt": f"q{i}", "completions": [f"reply {i:03}" + "!" * (i < 20)]} for i in range(28)]
    save_rows(tmp_path / "a.jsonl", ours)
    save_rows(tmp_path / "b.jsonl", theirs)
    sides = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    facts = compared(tmp_path, *sides, flags=["--judge", settings])
    (one,) = facts["judged"]
    assert (one["wins"], one["losses"], one["ties"]) == (20, 0, 8) and facts["suites"] == {}
    assert one["win_rate"] == pytest.approx(24 / 28) and one["low"] < one["win_rate"] < one["high"]
    assert (one["agree"], one["first"], one["second"]) == (20, 8, 0) and one["bias_p"] == 2 / 2**8
    assert one["p"] == 2 / 2**20 and one["not_judged"] == {"only in A": 2} and one["requests"] == 56
    won, placed = one["items"][0], one["items"][-1]
    assert (won["result"], won["a_first"], won["b_first"]) == ("win", "b", "b") and won["b"] == "reply 000!"
    assert (placed["result"], placed["a_first"], placed["b_first"]) == ("tie", "a", "b")
    assert won["replies"] == ["[[B]]", "[[A]]"] and placed["replies"] == ["[[A]]", "[[A]]"]
    out = " ".join(capsys.readouterr().out.split())
    assert "The judge prefers b to a on completions (p < 0.0001)." in out
    assert "20 of 28 verdicts are the same in both orders; 8 follow the first position" in out
    assert "0 the second (p = 0.0078)." in out
    page = (tmp_path / "out/compare.html").read_text()
    assert "reply 000!" in page and "The judge prefers b to a" in page and "[A is b] [[A]]\n\n[A is a] [[B]]" in page
    graded = [answered([1.0] * 4), answered([0.0] * 4)]
    scored = [evaluation(tmp_path / name, answers) for name, answers in zip("cd", graded, strict=True)]
    both = compared(tmp_path, *scored, flags=["--judge", settings])
    assert len(both["judged"]) == 1 and only(both)["losses"] == 4
    (tmp_path / "out/compare.svg").write_bytes(b"of an earlier comparison")
    empty = [{"prompt": f"q{i}", "completions": ["", "second"]} for i in range(30)]
    save_rows(tmp_path / "silent.jsonl", [*empty, {"prompt": "q30", "error": "too long"}])
    save_rows(tmp_path / "same.jsonl", [*empty[:4], *theirs[4:]])
    first, second = compared(tmp_path, tmp_path / "silent.jsonl", *sides[:1], tmp_path / "same.jsonl",
                             flags=["--judge", settings])["judged"]  # fmt: skip
    assert (first["wins"], first["not_judged"]) == (30, {}) and (second["wins"], second["ties"]) == (24, 4)
    assert [one["p_adjusted"] for one in (first, second)] == pytest.approx(holm([first["p"], second["p"]]))
    assert not (tmp_path / "out/compare.svg").exists()
    assert main(["compare", *map(str, sides)]) == 1 and "no scored suite" in capsys.readouterr().err
    for wrong in ("gpt-4", "{model: m}"):
        assert main(["compare", *scored, "--judge", wrong]) != 0
        assert "base_url" in capsys.readouterr().err


@pytest.mark.slow
def test_grpo_learns_sums_and_seeds_do_not_differ(sums_home, tmp_path):
    """A GRPO run before and after: the difference is found; two seeds of it: none is."""
    runs = []
    for seed in (0, 1):
        sections = {
            "name": f"grpo-{seed}",
            "seed": seed,
            "output_dir": str(tmp_path),
            "model": str(sums_home / "model"),
            "method": {"type": "grpo", "num_generations": 8},
            "rewards": [EXACT],
            "data": {
                "source": str(sums_home / "train.jsonl"),
                "template": "none",
                "max_length": 24,
                "validation": {"source": str(sums_home / "test.jsonl")},
            },
            "rollout": {"max_completion_length": 6},
            "training": {"batch_size": 16, "max_steps": 120, "learning_rate": 1e-3},
            "evaluation": {"eval_steps": 60},
            "devices": {"type": "cpu"},
        }
        save_json(tmp_path / "grpo.json", sections)
        assert main(["train", str(tmp_path / "grpo.json")]) == 0
        runs.append(str(tmp_path / f"grpo-{seed}"))
    before = only(compared(tmp_path, f"{runs[0]}@0", runs[0]))
    seeds = only(compared(tmp_path, *runs))
    print({name: (one["value"], one["low"], one["high"]) for name, one in (("before", before), ("seeds", seeds))})
    assert before["better"] == "grpo-0" and before["low"] > 0
    assert seeds["better"] is None and seeds["low"] < 0 < seeds["high"]


def test_what_is_refused(tmp_path, capsys):
    a = evaluation(tmp_path / "a", answered([1.0, 0.0, 1.0]))
    other = evaluation(tmp_path / "other", answered([1.0, 0.0], suite="gsm8k"))
    short = evaluation(tmp_path / "short", answered([1.0, 0.0, 1.0]), count=5)
    twice = evaluation(tmp_path / "twice", [*answered([1.0, 0.0]), *answered([1.0])])
    damaged = evaluation(tmp_path / "damaged", answered([1.0, 0.0, 1.0]))
    (tmp_path / "damaged/answers.jsonl").write_text('{"suite": "sums"\n')
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished/evaluation.sqlite").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    broken = run_of(tmp_path / "broken", [[0.5]], steps=[1])
    (tmp_path / "broken/rollouts.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    for name in ("one", "two"):
        run_of(tmp_path / "several" / name, [[0.5]], steps=[1])
    ungraded = evaluation(tmp_path / "ungraded", answered([None, None, None]))
    for sides, message in (
        ([a], "give at least two sides"),
        ([a, a], "is given twice"),
        ([a, f"x={a}/../a"], "is given twice (also as"),
        ([a, tmp_path / "missing"], "there is no file or folder"),
        ([a, tmp_path / "empty"], "has nothing to compare: no evaluation"),
        ([a, other], "no scored suite that two of these have in common (a: sums; other: gsm8k)"),
        ([a, short], "is incomplete: answers.jsonl has 3 answers of sums, but summary.json counts 5"),
        ([a, twice], "has item 0, sample 0 of sums twice"),
        ([a, damaged], "answers.jsonl line 1 is damaged"),
        ([a, tmp_path / "unfinished"], "not finished"),
        ([a, broken], "cannot be read"),
        ([a, f"{a}@3"], "is an evaluation: @3 names a step of a run"),
        ([a, tmp_path / "several"], "several contains 2 runs: name one, such as"),
        ([a, ungraded], "no graded item in common (3 not graded in B)"),
    ):
        assert main(["compare", *map(str, sides), "-o", str(tmp_path / "out")]) != 0
        error = capsys.readouterr().err
        assert message in error and "unexpected" not in error, error
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert main(["compare", a, evaluation(tmp_path / "b", answered([1.0] * 3)), "-o", str(tmp_path / "file/out")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_what_models_write_is_inert(tmp_path, capsys):
    nasty = "<script>alert(1)</script>\x1b[2J$x^2$"
    texts = {"completion": nasty, "prompt": nasty, "extracted": nasty, "gold": nasty}
    a = evaluation(tmp_path / "a", [replace(one, **texts) for one in answered([1.0, 0.0])], nasty + "a")
    b = evaluation(tmp_path / "b", [replace(one, **texts) for one in answered([0.0, 0.0])], nasty + "b")
    compared(tmp_path, a, b)
    page, out = (tmp_path / "out/compare.html").read_text(), capsys.readouterr().out
    assert page.count("<script") == 1 and SCRIPT in page and "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page + out and r"\x1b[2J" in out
    assert any(said.startswith("<script>") for said in drawn(tmp_path / "out/compare.svg"))


def test_five_thousand_items_take_under_two_seconds(tmp_path, capsys):
    random = np.random.default_rng(4)
    for name in ("a", "b"):
        folder = evaluation(tmp_path / name, answered([0.0]), count=5000)
        row = {**asdict(PLAIN), "completion": "step by step " * 40}
        scores = enumerate(random.integers(0, 2, 5000).tolist())
        save_rows(tmp_path / folder / "answers.jsonl", [row | {"item": str(i), "score": float(v)} for i, v in scores])
    began = time.process_time()
    facts = compared(tmp_path, tmp_path / "a", tmp_path / "b")
    spent = time.process_time() - began
    print(f"2 x 5,000 items: {spent:.2f} s")
    assert spent < 2 and only(facts)["items"] == 5000


def test_names_of_sides(tmp_path):
    (tmp_path / "a=b").mkdir()
    assert split_name("new=runs/x") == ("new", "runs/x") and split_name("runs/x") == (None, "runs/x")
    assert split_name(str(tmp_path / "a=b")) == (None, str(tmp_path / "a=b"))
    a = read_source(evaluation(tmp_path / "one/final", answered([1.0, 0.0]), "same/final"))
    b = read_source(evaluation(tmp_path / "two/final", answered([0.0, 0.0]), "same/final"))
    sides = make_sides([(None, a), (None, b)])
    assert [side.name for side in sides] == [a.path, b.path]
    found = compare(sides, CompareOptions(resamples=100))
    assert [one.better for suite in found.suites for one in suite.differences] == [None]
