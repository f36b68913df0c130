"""The quickstart's output: results, `curves.svg`, report, table and next steps."""

import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from posttrain.base.console import numbers_table, text_table
from posttrain.base.files import table_beside
from posttrain.quickstart.model import COLUMNS, TAGS, Measured, Problem, Reply, contrasting, paired, rows
from posttrain.reports import page
from posttrain.reports.chart import Interval, chart, intervals
from posttrain.reports.curves import Panel, lines_of, smoothing
from posttrain.reports.drawing import Drawing, write_drawings
from posttrain.reports.report import SIZE
from posttrain.reports.series import Series
from posttrain.runs.files import load_json, save_json, save_rows
from posttrain.runs.progress import duration

LONGEST = 60  # maximum characters shown of a reply
SHOWN = ("SFT", "DPO", "GRPO")  # models whose replies are shown
TEXTS = table_beside(__file__, "texts.yaml")
STAGES = TEXTS["stages"]  # title of the plot, and the plotted metric


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results. The mappings have one entry per model: `untrained`, `SFT`, `DPO` …"""

    folder: Path
    seed: int
    problems: Sequence[Problem]
    replies: Mapping[str, Sequence[Reply]]
    rewards: Mapping[str, Sequence[float]]
    measured: Mapping[str, Measured]
    seconds: float


def write(outcome: Outcome, settings: Mapping[str, str]) -> None:
    """Write `answers.jsonl`, `results.json`, `curves.svg` and `report.html`."""
    folder = outcome.folder
    save_rows(folder / "answers.jsonl", answers(outcome))
    results = {stage: load_json(folder / stage / "results.json") for stage in STAGES}
    save_json(folder / "results.json", summary(outcome, results))
    curves = list(figures(outcome))
    write_drawings(folder / "curves.svg", curves, columns=3)
    sections = [
        page.Text("What happened", TEXTS["what"].strip()),
        page.Table("Results", ["", *COLUMNS], rows(outcome.measured), TEXTS["how"].strip()),
        page.Text("In short", in_short(outcome)),
        page.charts("Curves", curves),
        page.Table("Examples", ["problem", "answer", *SHOWN], examples(outcome), "Working, then solution."),
        page.Text("What to try next", "\n".join(f"{step}\n    {why}" for step, why in next_steps(folder)), True),
        *(page.Text(f"{stage}.yaml", text, code=True) for stage, text in settings.items()),
        page.Facts("Made with", {
            "seed": outcome.seed, "time": duration(outcome.seconds), "machine": platform.platform(),
            "CPU threads": torch.get_num_threads(),
        }),
    ]  # fmt: skip
    page.write_page(folder / "report.html", "posttrain quickstart", sections)


def figures(outcome: Outcome) -> Iterator[Drawing]:
    """The main metric of every stage over its steps, then right answers with 95 % intervals."""
    for stage, (title, metric) in STAGES.items():
        lines = list(lines_of(Panel(title, (metric,)), Series(outcome.folder / stage).refresh(), "step"))
        share = metric.endswith(("accuracy", "accuracies"))
        yield chart(lines, title, smooth=smoothing(lines), share=share, ends=True, size=SIZE)
    right = {name: model.right for name, model in outcome.measured.items()}
    rows = [Interval(name, share.value, *share.interval, colour=0) for name, share in right.items()]
    yield intervals("Right answers, held-out problems", rows)


def tell(outcome: Outcome, console: Console) -> None:
    """Print the table, a few examples, and what to try next, in 80 columns."""
    console.print()
    table = numbers_table("", *COLUMNS)
    for row in rows(outcome.measured):
        table.add_row(*row)
    console.print(table)
    console.print("95 % intervals (Wilson) in brackets; sampled at temperature 1 unless greedy.", style="dim")
    console.print(in_short(outcome), highlight=False)
    console.print()
    columns = ("problem", *SHOWN)
    table = text_table(*columns, left=columns, title="Examples")
    for problem, _, *replies in examples(outcome):
        table.add_row(problem, *replies)
    console.print(table)
    report = outcome.folder / "report.html"
    console.print(f"Done in {duration(outcome.seconds)}. See {report}", soft_wrap=True, markup=False)
    console.print("\nWhat to try next", style="bold")
    for command, why in next_steps(outcome.folder):
        console.print(f"  {command}", highlight=False, soft_wrap=True, style="cyan", markup=False)
        console.print(f"      {why}", highlight=False)


def answers(outcome: Outcome) -> list[dict[str, Any]]:
    """One row per problem: every model's reply, whether the reply is right, and its reward."""
    return [
        {"problem": problem["problem"], "answer": problem["answer"]}
        | {
            name: {"reply": replies[at].text, "right": replies[at].right, "reward": outcome.rewards[name][at]}
            for name, replies in outcome.replies.items()
        }
        for at, problem in enumerate(outcome.problems)
    ]


def summary(outcome: Outcome, stages: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `results.json`."""
    models = {
        name: asdict(model) | {"right_share": model.right.value, "right_interval": list(model.right.interval)}
        for name, model in outcome.measured.items()
    }
    against = {name: {"only_sft_right": sft, "only_it_right": it} for name, (sft, it) in changes(outcome).items()}
    return {
        "seed": outcome.seed,
        "seconds": round(outcome.seconds, 1),
        "models": models,
        "against_sft": against,
        "stages": {stage: results["final"] for stage, results in stages.items()},
    }


def in_short(outcome: Outcome) -> str:
    """Sentences that compare the models on the same problems and state the reward model's accuracy."""
    accuracy = load_json(outcome.folder / "reward" / "results.json")["final"]["eval_accuracy"]
    lines = [
        f"SFT and {name}: only {name} solves {after:,} problems, only SFT solves {before:,}."
        for name, (before, after) in changes(outcome).items()
    ]
    return "\n".join([*lines, f"The reward model puts {accuracy:.1%} of the held-out pairs in the right order."])


def changes(outcome: Outcome) -> dict[str, tuple[int, int]]:
    """For each model that started from SFT: how many problems only SFT solves, and how many only the model solves."""
    after = {name: replies for name, replies in outcome.replies.items() if name not in ("untrained", "SFT")}
    return {name: paired(outcome.replies["SFT"], replies) for name, replies in after.items()}


def examples(outcome: Outcome) -> list[list[str]]:
    """A few problems with the answer and the replies of the models in SHOWN, marked as right or wrong."""
    rows = []
    for at in contrasting(outcome.replies, "SFT", "DPO"):
        shown = [outcome.replies[name][at] for name in SHOWN]
        marked = [f"{readable(reply.text)} {'✓' if reply.right else '✗'}" for reply in shown]
        rows.append([outcome.problems[at]["problem"], outcome.problems[at]["answer"], *marked])
    return rows


def readable(reply: str) -> str:
    """A reply with line breaks and an arrow instead of tags, truncated if it is long."""
    text = reply.removeprefix(TAGS.reasoning_start).removesuffix(TAGS.solution_end)
    text = text.replace(f"{TAGS.reasoning_end}{TAGS.solution_start}", "\n→ ").strip("\n")
    text = "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def next_steps(folder: Path) -> list[tuple[str, str]]:
    """Commands to try next, each with its purpose."""
    sft, dpo = (shlex.quote(str(folder / name)) for name in ("sft.yaml", "dpo.yaml"))
    return [(command.format(sft=sft, dpo=dpo), why) for command, why in TEXTS["next"]]
