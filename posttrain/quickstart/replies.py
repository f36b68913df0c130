"""Asking a model: sampled or greedy answers to problems, whether they are right, and the results on held-out ones."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.base.progress import counter, progress
from posttrain.config import ModelConfig, TagsConfig
from posttrain.data.render import RenderRequest, rendered
from posttrain.engines import EmbeddedEngine, Sampling, seed_of, stop_token_ids, text_of
from posttrain.models.load import load_model, load_tokenizer

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
