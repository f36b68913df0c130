"""The whole chain on a small task: a model with random weights is trained by SFT, DPO, PPO and GRPO within minutes.

Three of four demonstrations show the working; the fourth only states the answer. SFT imitates both. The preference
pairs are the model's own replies, a right and a wrong one, and nothing labels the working: the reward model and DPO
learn from the pairs that showing the working helps. PPO and GRPO learn this from their own completions.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from posttrain import runner
from posttrain.base.console import PlainConsole
from posttrain.base.errors import RunError
from posttrain.base.files import from_template
from posttrain.config import load
from posttrain.data import arithmetic_problems
from posttrain.quickstart.model import Measured, make_model, make_pairs, measure, rewards, sample_replies
from posttrain.quickstart.show import Outcome, tell, write
from posttrain.runs.atomic import refusing, write_file
from posttrain.runs.files import save_rows

__all__ = ["Size", "quickstart"]

HELD_OUT = 0.15  # share of the problems whose pairs are used for validation
# Stage -> number of evaluations and of lines of metrics. The settings of a stage are in STAGE.yaml beside this file.
REPORTED = {"sft": (6, 16), "reward": (5, 10), "dpo": (5, 10), "ppo": (4, 10), "grpo": (4, 10)}


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the data and numbers of steps."""

    worked: int = 27_000  # demonstrations that show their working
    bare: int = 9_000  # demonstrations that only state the answer
    sft_steps: int = 1800
    problems: int = 2000  # problems whose sampled replies become preference pairs
    samples: int = 6  # replies sampled for each of these problems
    reward_steps: int = 100
    dpo_steps: int = 100
    ppo_steps: int = 16
    grpo_steps: int = 30
    held_out: int = 1000  # problems for the final evaluation


def quickstart(
    folder: Path, *, seed: int = 0, overwrite: bool = False, size: Size | None = None, console: Console | None = None
) -> dict[str, Measured]:
    """Make, train and evaluate all models in `folder`. Returns each model's results on held-out problems.

    Raises RunError if the folder is not empty (with `overwrite`: if it does not contain a quickstart).
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

    head(3, "Preference pairs", "Pair a right reply of the model with one of its wrong replies to the same problem.")
    console.print(f"     {write_pairs(folder, sft, size, seed)}")

    head(4, "Reward model", "Learn from the pairs to score how good a reply is.")
    reward = train("reward")

    head(5, "DPO", "Make the better reply of each pair more likely, and the worse one less.")
    dpo = train("dpo")

    head(6, "PPO", "Sample replies, score them with the reward model, make the better ones more likely.")
    ppo = train("ppo")

    head(7, "GRPO", "The same, but a rule grades replies as right or wrong, compared with others to the same problem.")
    grpo = train("grpo")

    head(8, "Results", f"Sampled and greedy replies to {size.held_out:,} problems that no model was trained on.")
    problems = list(arithmetic_problems("test", size.held_out, seed))
    models = {"untrained": untrained, "SFT": sft, "DPO": dpo, "PPO": ppo, "GRPO": grpo}
    paths = models.items()
    greedy = {name: sample_replies(path, problems, f"{name}: most likely replies") for name, path in paths}
    replies = {name: sample_replies(path, problems, f"{name}: sampled replies", seed=seed) for name, path in paths}
    scores = {name: rewards(reward, given, f"{name}: judging") for name, given in replies.items()}
    measured = {name: measure(replies[name], greedy[name], scores[name]) for name in models}
    outcome = Outcome(folder, seed, problems, replies, scores, measured, time.perf_counter() - began)
    write(outcome, settings)
    tell(outcome, console)
    return measured


def claim(folder: Path, overwrite: bool) -> None:
    """Create the folder. With `overwrite`, reuse the folder of an earlier quickstart and delete its results."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file: give another --output-dir")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "sft.yaml").is_file():
            raise RunError(f"{folder} is not empty, and not a quickstart: give another --output-dir")
        if not overwrite:
            raise RunError(f"{folder} contains a quickstart: replace it with --overwrite, or give another --output-dir")
    with refusing(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "answers.jsonl", "curves.svg", "report.html"):
            (folder / name).unlink(missing_ok=True)


def write_bare_demonstrations(folder: Path, size: Size, seed: int) -> None:
    """Write `bare.jsonl`: demonstrations without working. Those with working come from `builtin:arithmetic`."""
    rows = arithmetic_problems("train", size.bare, seed + 1)
    save_rows(folder / "bare.jsonl", [{"problem": row["problem"], "answer": row["answer"]} for row in rows])


def write_pairs(folder: Path, model: Path, size: Size, seed: int) -> str:
    """Write preference pairs from the model's own replies: for training, and, from other problems, for validation."""
    problems = list(arithmetic_problems("train", size.problems, seed + 2))
    replies = sample_replies(model, problems, "sampling", samples=size.samples, seed=seed)
    cut = size.samples * round(size.problems * (1 - HELD_OUT))
    train, test = make_pairs(replies[:cut], size.samples), make_pairs(replies[cut:], size.samples)
    if not train or not test:
        raise RunError(f"{model} gave too few right replies for preference pairs: give another --seed")
    save_rows(folder / "pairs" / "train.jsonl", train)
    save_rows(folder / "pairs" / "test.jsonl", test)
    right = sum(reply.right for reply in replies)
    return f"{len(replies):,} replies, {right:,} right: {len(train):,} pairs to train on, {len(test):,} held out"


def settings_files(folder: Path, seed: int, size: Size) -> dict[str, str]:
    """The YAML settings of each stage, by name. Users can change and train them; other settings have their defaults."""
    values = {"folder": json.dumps(str(folder)), "seed": seed, **asdict(size)}
    files: dict[str, str] = {}
    for stage, (evaluations, lines) in REPORTED.items():
        steps = getattr(size, f"{stage}_steps")
        own = {"steps": steps, "eval_steps": max(1, steps // evaluations), "logging_steps": max(1, steps // lines)}
        files[stage] = from_template(__file__, f"{stage}.yaml", {}, **values, **own)
    return files
