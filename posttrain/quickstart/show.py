"""The quickstart's output: results, `curves.svg`, report, table, next steps."""

import math
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.base.progress import counter, progress
from posttrain.config import ModelConfig, TagsConfig
from posttrain.data.render import RenderRequest, rendered
from posttrain.engines import EmbeddedEngine, Sampling, seed_of, stop_token_ids, text_of
from posttrain.models.load import load_model, load_tokenizer
from posttrain.reports import page
from posttrain.reports.chart import Interval, chart, intervals
from posttrain.reports.curves import Panel, lines_of
from posttrain.reports.drawing import Drawing, write_drawings
from posttrain.reports.report import SIZE, smoothing
from posttrain.reports.series import Series
from posttrain.runs.files import load_json, save_json, save_rows
from posttrain.runs.progress import duration

LONGEST = 60  # characters of a reply shown
SHOWN = ("SFT", "DPO", "GRPO")  # models whose replies are shown
WHAT = """\
A model with random weights learned arithmetic. Three of four demonstrations show the working, the fourth only states \
the answer; SFT imitates both. Then the model answered problems several times, and right replies were paired with \
wrong ones to the same problem. From these pairs a reward model learned to score replies, and DPO to prefer the better \
ones. PPO sampled replies and was trained on the reward model's scores; GRPO sampled several per problem, rewarded by \
a rule for right answers. No label says that showing the working helps."""
HOW = """\
Replies are sampled at temperature 1, like those in the pairs; greedy takes the most likely token each time. A share \
is followed by its 95 % interval (Wilson). Working: the reply shows it; format: the reply follows it. The reward is \
the reward model's mean: only differences are meaningful."""
# Stage -> its title, and the plotted metric
STAGES = {
    "sft": ("1. SFT: loss", "loss"),
    "reward": ("2. Reward model: pairs in the right order", "accuracy"),
    "dpo": ("3. DPO: pairs in the right order", "rewards/accuracies"),
    "ppo": ("4. PPO: the reward model's reward", "reward"),
    "grpo": ("5. GRPO: the rule's reward", "reward"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results. The mappings have an entry per model: `untrained`, `SFT`, `DPO` …"""

    folder: Path
    seed: int
    problems: Sequence[Problem]
    replies: Mapping[str, Sequence[Reply]]
    rewards: Mapping[str, Sequence[float]]
    measured: Mapping[str, Measured]
    seconds: float


def write(outcome: Outcome, settings: Mapping[str, str]) -> None:
    """`answers.jsonl`, `results.json`, `curves.svg` and `report.html`."""
    folder = outcome.folder
    save_rows(folder / "answers.jsonl", answers(outcome))
    results = {stage: load_json(folder / stage / "results.json") for stage in STAGES}
    save_json(folder / "results.json", summary(outcome, results))
    curves = list(figures(outcome))
    write_drawings(folder / "curves.svg", curves, columns=3)
    sections = [
        page.Text("What happened", WHAT),
        page.Table("Results", ["", *COLUMNS], rows(outcome.measured), HOW),
        page.Text("In short", in_short(outcome)),
        page.charts("Curves", curves),
        page.Table("Examples", ["problem", "answer", *SHOWN], examples(outcome), "Working, then solution."),
        page.Text("What to try next", "\n".join(f"{step}\n    {why}" for step, why in next_steps(folder)), True),
        *(page.Text(f"{stage}.yaml", text, code=True) for stage, text in settings.items()),
        page.Facts("Made with", made_with(outcome)),
    ]
    page.write_page(folder / "report.html", "posttrain quickstart", sections)


def figures(outcome: Outcome) -> Iterator[Drawing]:
    """The main metric of every stage over its steps, then right answers with 95 % intervals."""
    for stage, (title, metric) in STAGES.items():
        lines = list(lines_of(Panel(title, (metric,)), Series(outcome.folder / stage).refresh(), "step"))
        share = metric.endswith(("accuracy", "accuracies"))
        yield chart(lines, title, smooth=smoothing(lines), share=share, ends=True, size=SIZE)
    rows = [
        Interval(name, model.right.value, *model.right.interval, colour=0) for name, model in outcome.measured.items()
    ]
    yield intervals("Right answers, held-out problems", rows)


def tell(outcome: Outcome, console: Console) -> None:
    """The table, a few examples, and what to try next, in 80 columns."""
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows(outcome.measured):
        table.add_row(*row)
    console.print(table)
    console.print("In brackets: 95 % intervals (Wilson). Sampled at temperature 1 unless greedy.", style="dim")
    console.print(in_short(outcome), highlight=False)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Examples", title_justify="left", title_style="bold")
    table.add_column("problem", ratio=2, overflow="fold")
    for name in SHOWN:
        table.add_column(name, ratio=3, overflow="fold")
    for problem, _, *said in examples(outcome):
        table.add_row(problem, *said)
    console.print(table)
    written = outcome.folder / "report.html"
    console.print(f"Done in {duration(outcome.seconds)}. See {written}", soft_wrap=True, markup=False)
    console.print("\nWhat to try next", style="bold")
    for command, why in next_steps(outcome.folder):
        console.print(f"  {command}", highlight=False, soft_wrap=True, style="cyan", markup=False)
        console.print(f"      {why}", highlight=False)


def answers(outcome: Outcome) -> list[dict[str, Any]]:
    """A row per problem: every model's reply, whether it is right, and its reward."""
    return [
        {"problem": problem["problem"], "answer": problem["answer"]}
        | {
            name: {"reply": given[at].text, "right": given[at].right, "reward": outcome.rewards[name][at]}
            for name, given in outcome.replies.items()
        }
        for at, problem in enumerate(outcome.problems)
    ]


def summary(outcome: Outcome, stages: Mapping[str, Any]) -> dict[str, Any]:
    """`results.json`."""
    models = {
        name: asdict(model) | {"right_share": model.right.value, "right_interval": list(model.right.interval)}
        for name, model in outcome.measured.items()
    }
    return {
        "seed": outcome.seed,
        "seconds": round(outcome.seconds, 1),
        "models": models,
        "against_sft": {
            name: {"only_sft_right": before, "only_it_right": after}
            for name, (before, after) in changes(outcome).items()
        },
        "stages": {stage: results["final"] for stage, results in stages.items()},
    }


def made_with(outcome: Outcome) -> dict[str, Any]:
    time, threads = duration(outcome.seconds), torch.get_num_threads()
    return {"seed": outcome.seed, "time": time, "machine": platform.platform(), "CPU threads": threads}


def in_short(outcome: Outcome) -> str:
    """The comparison of models on the same problems, and the reward model's accuracy, in words."""
    accuracy = load_json(outcome.folder / "reward" / "results.json")["final"]["eval_accuracy"]
    lines = [
        f"From SFT to {name}: {after:,} problems that only {name} gets right, {before:,} that only SFT does."
        for name, (before, after) in changes(outcome).items()
    ]
    return "\n".join([*lines, f"Reward model: {accuracy:.1%} of the held-out pairs in the right order."])


def changes(outcome: Outcome) -> dict[str, tuple[int, int]]:
    """For each model that started from SFT: problems that only SFT solves, and that only the model solves."""
    after = {name: replies for name, replies in outcome.replies.items() if name not in ("untrained", "SFT")}
    return {name: paired(outcome.replies["SFT"], replies) for name, replies in after.items()}


def examples(outcome: Outcome) -> list[list[str]]:
    """A few problems with the answer and the replies of SHOWN, marked as right or wrong."""
    shown = [outcome.replies[name] for name in SHOWN]
    return [
        [
            outcome.problems[at]["problem"],
            outcome.problems[at]["answer"],
            *(f"{readable(given[at].text)} {'✓' if given[at].right else '✗'}" for given in shown),
        ]
        for at in telling(outcome.replies, "SFT", "DPO")
    ]


def readable(reply: str) -> str:
    """A reply with line breaks and an arrow instead of tags; an untrained model's reply is truncated."""
    text = reply.removeprefix(TAGS.reasoning_start).removesuffix(TAGS.solution_end)
    text = text.replace(f"{TAGS.reasoning_end}{TAGS.solution_start}", "\n→ ").strip("\n")
    text = "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def next_steps(folder: Path) -> list[tuple[str, str]]:
    """Commands that work from here."""
    sft, dpo = (shlex.quote(str(folder / name)) for name in ("sft.yaml", "dpo.yaml"))
    return [
        (f"posttrain explore {sft}", "which tokens are trained, in colour"),
        (f"posttrain train {dpo} name=ipo method.loss_type=ipo", "another preference loss"),
        (f"posttrain train {sft} name=longer training.max_steps=4000", "a better start: train longer"),
        (f"posttrain plan {dpo} model.lora=true", "what a run would take, here with adapters"),
        ("posttrain config new dpo", "a commented settings file for your own model and data"),
    ]


LONGEST = 56  # tokens of a reply; a right one has at most 45
ROWS = 256  # replies scored at a time
PER_PROBLEM = 2  # maximum pairs of one problem
TAGS = TagsConfig()
Problem = dict[str, str]  # problem, solution (the working), answer


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply to a problem. `text` starts with the tag that the prompt ends with."""

    problem: str
    text: str
    formatted: bool  # working, then solution, each between its tags, and nothing else
    worked: bool  # and there is a working
    right: bool  # and the solution is the answer, to the letter
    finished: bool  # the model stopped by itself


PARTS = [re.escape(tag) for tag in TAGS.model_dump().values()]
FORMAT = re.compile("{}((?:(?!{tag}).)*){}{}((?:(?!{tag}).)*){}".format(*PARTS, tag="|".join(PARTS)), re.DOTALL)


def grade(text: str, answer: str) -> tuple[bool, bool, bool]:
    """Whether a reply follows the format (every tag once, in order), shows working, and gives the answer."""
    found = FORMAT.fullmatch(text)
    return (True, found[1] != "", found[2] == answer) if found else (False, False, False)


def ask(
    model: Path, problems: Sequence[Problem], what: str, *, samples: int = 1, seed: int | None = None
) -> list[Reply]:
    """`samples` replies to every problem, grouped by problem; greedy, or at temperature 1 with a seed."""
    settings = ModelConfig(path=str(model))
    tokenizer = load_tokenizer(settings)
    policy = load_model(settings, "lm", torch.float32, torch.device("cpu"))
    engine = EmbeddedEngine(policy)
    sampling = Sampling(
        temperature=0.0 if seed is None else 1.0,
        max_completion_length=LONGEST,
        num_generations=samples,
        stop_token_ids=stop_token_ids(policy, tokenizer),
    )
    prompts = rendered(tokenizer, [RenderRequest(turns(problem["problem"]), generate=True) for problem in problems])
    tokens = tokenizer(prompts, add_special_tokens=False).input_ids
    seeds = [seed_of(seed or 0, index) for index in range(len(problems))]
    with counter(what, len(problems)) as count:
        groups = engine.generate(tokens, sampling, seeds=seeds, finished=lambda *_: count())
    replies = []
    for problem, prompt, group in zip(problems, tokens, groups, strict=True):
        for completion in group:
            text = TAGS.reasoning_start + text_of(completion, (), tokenizer, prompt)
            finished = completion.finish_reason == "stop"
            replies.append(Reply(problem["problem"], text, *grade(text, problem["answer"]), finished))
    return replies


@torch.inference_mode()
def rewards(model: Path, replies: Sequence[Reply], what: str) -> list[float]:
    """The reward model's score of each reply."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    judge = AutoModelForSequenceClassification.from_pretrained(model).eval()
    values: list[float] = []
    for start in progress(range(0, len(replies), ROWS), what):
        some = replies[start : start + ROWS]
        texts = rendered(tokenizer, [RenderRequest(turns(reply.problem, reply.text)) for reply in some])
        batch = tokenizer(texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
        values += judge(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()
    return values


def turns(problem: str, reply: str | None = None) -> list[dict[str, str]]:
    """A conversation of one question, with its reply if there is one."""
    said = [{"role": "user", "content": problem}]
    return said if reply is None else [*said, {"role": "assistant", "content": reply}]


def make_pairs(replies: Sequence[Reply], samples: int) -> list[dict[str, str]]:
    """Preferences from a model's own replies: a right one is better than a wrong one to the same problem.

    A problem has as many pairs as it has different right and wrong replies to match; unfinished replies are dropped.
    """
    pairs = []
    for start in range(0, len(replies), samples):
        group = [reply for reply in replies[start : start + samples] if reply.finished]
        right = dict.fromkeys(reply.text for reply in group if reply.right)
        wrong = dict.fromkeys(reply.text for reply in group if not reply.right)
        for chosen, rejected in zip(cycle(right), list(wrong)[:PER_PROBLEM], strict=False):
            pairs.append({"prompt": replies[start].problem, "chosen": chosen, "rejected": rejected})
    return pairs


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `total`, and the 95 % interval of the share behind it (Wilson's score interval, 1927)."""

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        z2 = 1.959964**2
        n, p = self.total, self.value
        centre = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({100 * low:.1f}–{100 * high:.1f})"


@dataclass(frozen=True, slots=True)
class Measured:
    """One model on the held-out problems."""

    right: Share
    right_greedy: Share
    formatted: Share
    worked: Share
    reward: float  # mean


def measure(replies: Sequence[Reply], greedy: Sequence[Reply], rewards: Sequence[float]) -> Measured:
    """Count right replies, sampled and greedy; `rewards` are those of the sampled ones."""
    total = len(replies)
    return Measured(
        right=Share(sum(reply.right for reply in replies), total),
        right_greedy=Share(sum(reply.right for reply in greedy), total),
        formatted=Share(sum(reply.formatted for reply in replies), total),
        worked=Share(sum(reply.worked for reply in replies), total),
        reward=sum(rewards) / total,
    )


def paired(before: Sequence[Reply], after: Sequence[Reply]) -> tuple[int, int]:
    """The numbers of problems that only the first model solves, and only the second."""
    both = list(zip(before, after, strict=True))
    return sum(b.right and not a.right for b, a in both), sum(a.right and not b.right for b, a in both)


COLUMNS = ("right answer", "right, greedy", "working", "format", "reward")


def rows(measured: Mapping[str, Measured]) -> list[list[str]]:
    """The table of results: a row per model, in COLUMNS."""
    return [
        [
            name,
            str(model.right),
            str(model.right_greedy),
            f"{model.worked.value:.1%}",
            f"{model.formatted.value:.1%}",
            f"{model.reward:+.2f}",
        ]
        for name, model in measured.items()
    ]


def telling(replies: Mapping[str, Sequence[Reply]], first: str, second: str) -> list[int]:
    """Indices of a few problems to show: solved only by the second model, by both, only by the first, by neither."""
    kinds = ((False, True), (True, True), (True, False), (False, False))
    pairs = [(b.right, a.right) for b, a in zip(replies[first], replies[second], strict=True)]
    return [pairs.index(kind) for kind in kinds if kind in pairs]
