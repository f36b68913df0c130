"""The whole chain on a small task: a model from random weights, fine-tuned, rewarded and preference-tuned in minutes.

Three of four demonstrations show the working, the fourth only states the answer. SFT imitates both. The preference
pairs are the model's own replies, a right and a wrong one, without a label for working: the reward model and DPO learn
from them that showing the working helps. PPO and GRPO learn it from their own completions.
"""

import time
from pathlib import Path

from rich.console import Console

from posttrain import runner
from posttrain.base.console import PlainConsole
from posttrain.base.errors import RunError
from posttrain.config import load
from posttrain.data import arithmetic_problems
from posttrain.quickstart.model import make_model
from posttrain.quickstart.replies import Measured, ask, make_pairs, measure, rewards
from posttrain.quickstart.show import Outcome, tell, write
from posttrain.quickstart.stages import Size, settings_files
from posttrain.runs.atomic import write_file
from posttrain.runs.files import save_rows

__all__ = ["Size", "quickstart"]

HELD_OUT = 0.15  # share of the problems whose pairs only measure


def quickstart(
    folder: Path, *, seed: int = 0, overwrite: bool = False, size: Size | None = None, console: Console | None = None
) -> dict[str, Measured]:
    """Make, train and evaluate everything in `folder`; returns each model's results on held-out problems.

    Raises RunError if the folder is not empty (with `overwrite`: if it is not a quickstart).
    """
    size, console, began = size or Size(), console or PlainConsole(), time.perf_counter()
    claim(folder, overwrite)
    settings = settings_files(folder, seed, size)
    for stage, text in settings.items():
        write_file(folder / f"{stage}.yaml", text)

    def head(number: int, title: str, why: str) -> None:
        console.print(f"\n{number}/8  {title}", style="bold")
        console.print(f"     {why}")

    def train(stage: str) -> Path:
        file = folder / f"{stage}.yaml"
        console.print(f"     posttrain train {file}", style="dim", soft_wrap=True)
        runner.train(load(file).config, overwrite=overwrite)
        return folder / stage / "final"

    head(1, "Untrained model", "Random weights, and a tokenizer trained on the task.")
    untrained = folder / "model"
    console.print(f"     Qwen3 architecture, {make_model(untrained, seed):,} weights")

    head(2, "SFT", "Learn by imitation; three of four demonstrations show their working.")
    write_bare_demonstrations(folder, size, seed)
    sft = train("sft")

    head(3, "Preference pairs", "Of the model's own replies to a problem, a right one is preferred to a wrong one.")
    console.print(f"     {write_pairs(folder, sft, size, seed)}")

    head(4, "Reward model", "Learn from the pairs to score how good a reply is.")
    reward = train("reward")

    head(5, "DPO", "Make the better reply of each pair more likely, and the worse one less.")
    dpo = train("dpo")

    head(6, "PPO", "Sample replies, score them with the reward model, make the better ones more likely.")
    ppo = train("ppo")

    head(7, "GRPO", "The same with a rule as the judge: right or wrong, compared with other replies to the problem.")
    grpo = train("grpo")

    head(8, "Results", f"{size.held_out:,} problems that no model was trained on, sampled and greedy.")
    problems = list(arithmetic_problems("test", size.held_out, seed))
    models = {"untrained": untrained, "SFT": sft, "DPO": dpo, "PPO": ppo, "GRPO": grpo}
    greedy = {name: ask(path, problems, f"{name}: most likely replies") for name, path in models.items()}
    replies = {name: ask(path, problems, f"{name}: sampled replies", seed=seed) for name, path in models.items()}
    scores = {name: rewards(reward, given, f"{name}: judging") for name, given in replies.items()}
    measured = {name: measure(replies[name], greedy[name], scores[name]) for name in models}
    outcome = Outcome(folder, seed, problems, replies, scores, measured, time.perf_counter() - began)
    write(outcome, settings)
    tell(outcome, console)
    return measured


def claim(folder: Path, overwrite: bool) -> None:
    """Make the folder, or with `overwrite` reuse an earlier quickstart's, whose results are deleted."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file: give another --output-dir")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "sft.yaml").is_file():
            raise RunError(f"{folder} is not empty and not a quickstart: give another --output-dir")
        if not overwrite:
            raise RunError(f"{folder} has a quickstart: replace it (--overwrite), or give another --output-dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "answers.jsonl", "curves.svg", "report.html"):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error


def write_bare_demonstrations(folder: Path, size: Size, seed: int) -> None:
    """Demonstrations without working, in addition to those with working that `sft.yaml` takes from
    `builtin:arithmetic`."""
    rows = arithmetic_problems("train", size.bare, seed + 1)
    save_rows(folder / "bare.jsonl", [{"problem": row["problem"], "answer": row["answer"]} for row in rows])


def write_pairs(folder: Path, model: Path, size: Size, seed: int) -> str:
    """Preference pairs from the model's own replies, for training and, of other problems, for validation."""
    problems = list(arithmetic_problems("train", size.problems, seed + 2))
    replies = ask(model, problems, "sampling", samples=size.samples, seed=seed)
    cut = size.samples * round(size.problems * (1 - HELD_OUT))
    train, test = make_pairs(replies[:cut], size.samples), make_pairs(replies[cut:], size.samples)
    if not train or not test:
        raise RunError(f"{model} gave no right reply to prefer: give another --seed")
    save_rows(folder / "pairs" / "train.jsonl", train)
    save_rows(folder / "pairs" / "test.jsonl", test)
    right = sum(reply.right for reply in replies)
    return f"{len(replies):,} replies, {right:,} right: {len(train):,} pairs to train on, {len(test):,} held out"
