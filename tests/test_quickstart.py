"""`posttrain quickstart`: a small one end to end, what it leaves behind, and in the slow test what it must achieve."""

import json
import shlex
from pathlib import Path

import pytest
from network import calls_outside
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from posttrain.base.errors import RunError
from posttrain.cli import main
from posttrain.config import load
from posttrain.data import arithmetic_problems
from posttrain.quickstart import Size, quickstart
from posttrain.quickstart.model import Reply, Share, grade, make_pairs, make_tokenizer, rewards
from posttrain.quickstart.show import STAGES, next_steps
from posttrain.runs.metrics import read_metrics

# Enough SFT and problems for some right guesses, whatever is sampled, which the pairs need; hardly any of the rest.
TINY = Size(
    worked=1100, bare=1100, sft_steps=120, problems=400, samples=8, reward_steps=2, dpo_steps=2, ppo_steps=1,
    grpo_steps=1, held_out=20,
)  # fmt: skip


def test_a_small_one(tmp_path, capsys):
    """One test, since all that is looked at is what one quickstart of half a minute leaves."""
    folder = tmp_path / "start"
    console = Console(width=80, record=True, quiet=False, force_terminal=False)
    with calls_outside() as calls:
        quickstart(folder, size=TINY, console=console)
    assert calls == []
    printed = console.export_text()
    check_that_the_folder_is_whole(folder)
    check_that_numbers_come_from_the_runs(folder, printed)
    check_that_pairs_are_the_models_own_right_and_wrong_replies(folder)
    check_that_it_fits_80_columns_and_names_the_next_steps(folder, printed)
    check_that_next_steps_work(folder, capsys)
    check_that_an_occupied_folder_is_refused(folder, tmp_path)


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_that_the_folder_is_whole(folder):
    for name in (*(f"{stage}.yaml" for stage in STAGES), "results.json", "curves.svg", "report.html", "answers.jsonl"):
        assert (folder / name).stat().st_size > 300, name
    for stage in STAGES:
        assert json.loads((folder / stage / "run.json").read_text())["state"] == "finished"
        assert read_metrics(folder / stage)[-1]["step"] == load(folder / f"{stage}.yaml").config.training.max_steps
    page = (folder / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "") and page.count("<figure") == 6
    for model in ("model", "sft/final", "dpo/final", "ppo/final", "grpo/final"):
        assert AutoModelForCausalLM.from_pretrained(folder / model).num_parameters() < 1_000_000
    assert AutoModelForSequenceClassification.from_pretrained(folder / "reward/final").num_labels == 1


def check_that_numbers_come_from_the_runs(folder, printed):
    """Table, results.json and answers.jsonl agree with each other, with the problems and with the models."""
    results, rows = json.loads((folder / "results.json").read_text()), jsonl(folder / "answers.jsonl")
    problems = list(arithmetic_problems("test", TINY.held_out, 0))
    assert [(row["problem"], row["answer"]) for row in rows] == [(p["problem"], p["answer"]) for p in problems]
    for name, model in results["models"].items():
        right = sum(grade(row[name]["reply"], row["answer"])[2] for row in rows)
        mean = sum(row[name]["reward"] for row in rows) / len(rows)
        assert model["right"] == {"count": right, "total": TINY.held_out} and model["reward"] == pytest.approx(mean)
        assert str(Share(right, TINY.held_out)) in printed and f"{mean:+.2f}" in printed
    replies = [Reply(row["problem"], row["DPO"]["reply"], True, True, True, True) for row in rows]
    again = rewards(folder / "reward/final", replies, "again")
    assert again == pytest.approx([row["DPO"]["reward"] for row in rows], abs=1e-5)
    for stage, final in results["stages"].items():
        measured = "eval_reward" if stage in ("ppo", "grpo") else "eval_loss"
        assert final[measured] == [line[measured] for line in read_metrics(folder / stage) if measured in line][-1]


def check_that_pairs_are_the_models_own_right_and_wrong_replies(folder):
    answers = {p["problem"]: p["answer"] for p in arithmetic_problems("train", TINY.problems, 2)}
    train, test = jsonl(folder / "pairs/train.jsonl"), jsonl(folder / "pairs/test.jsonl")
    assert train and test and not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for row in train + test:
        assert grade(row["chosen"], answers[row["prompt"]])[2] and not grade(row["rejected"], answers[row["prompt"]])[2]


def check_that_it_fits_80_columns_and_names_the_next_steps(folder, printed):
    table = printed[printed.index("right answer") : printed.index("Done in")]
    assert max(map(len, table.splitlines())) <= 80
    for command, _ in next_steps(folder):
        assert command in printed


def check_that_next_steps_work(folder, capsys):
    for command, _ in next_steps(folder):
        program, *arguments = shlex.split(command)
        short = ["training.max_steps=1"] if arguments[0] in ("train", "plan") else []
        assert program == "posttrain" and main([*arguments, *short]) == 0, (command, capsys.readouterr().err)


def check_that_an_occupied_folder_is_refused(folder, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(RunError, match="--overwrite"):
        quickstart(folder, size=TINY)
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="not a quickstart"):
        quickstart(mine, size=TINY, overwrite=True)
    with pytest.raises(RunError, match="is a file"):
        quickstart(mine / "thesis.txt", size=TINY)
    assert (mine / "thesis.txt").read_text() == "mine"


def test_grade():
    worked = "<start_working_out>1 + 2 = 3<end_working_out><SOLUTION>3</SOLUTION>"
    assert grade(worked, "3") == (True, True, True)
    assert grade(worked, "30") == (True, True, False)
    assert grade("<start_working_out><end_working_out><SOLUTION>3</SOLUTION>", "3") == (True, False, True)
    assert grade(worked + " ", "3") == (False, False, False)
    assert grade(worked.replace("3<end", "<SOLUTION>3<end"), "3") == (False, False, False)
    assert grade(worked.replace("</SOLUTION>", ""), "3") == (False, False, False)


def test_make_pairs_matches_right_with_different_wrong_replies():
    def reply(problem: str, text: str, right: bool, finished: bool = True) -> Reply:
        return Reply(problem, text, True, True, right, finished)

    replies = [reply("a", "r", True), reply("a", "w", False), reply("a", "w", False), reply("a", "x", False)]
    replies += [reply("b", "w", False)] * 4
    replies += [reply("c", "r", True), reply("c", "cut", False, finished=False)] * 2
    pairs = [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in make_pairs(replies, 4)]
    assert pairs == [("a", "r", "w"), ("a", "r", "x")]


def test_wilson_interval():
    """Against the numbers of Newcombe 1998, table I (method 3): 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for count, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611),
                                    (1, 29, 0.0061, 0.1718)):  # fmt: skip
        assert Share(count, total).interval == pytest.approx((low, high), abs=5e-5)


def test_tokenizer_writes_any_text_and_knows_its_tags():
    tokenizer = make_tokenizer(seed=0)
    for text in ("What is 47 + 38?", "héllo ∑\n\n 12 <end_working_out>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("47<SOLUTION>") == ["4", "7", "<SOLUTION>"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dpo_improves_on_sft(tmp_path, seed):
    """The whole quickstart: SFT learns; DPO, PPO, GRPO get more right, intervals apart; the judge can tell."""
    measured = quickstart(tmp_path / "run", seed=seed)
    results = json.loads((tmp_path / "run/results.json").read_text())
    print({name: str(model.right) for name, model in measured.items()}, results["stages"]["reward"]["eval_accuracy"])
    assert measured["untrained"].right.value < 0.02
    assert 0.4 < measured["SFT"].right.value < 0.85
    assert measured["DPO"].right.interval[0] > measured["SFT"].right.interval[1]
    assert measured["DPO"].worked.value > 0.95 > measured["SFT"].worked.value
    assert measured["DPO"].reward > measured["SFT"].reward + 0.3
    for online in ("PPO", "GRPO"):
        assert measured[online].right.interval[0] > measured["SFT"].right.interval[1]
    assert results["stages"]["reward"]["eval_accuracy"] > 0.7
