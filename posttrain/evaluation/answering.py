"""Answers to the items of a suite: completions of an engine, the likeliest choice, or recorded completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.batch import Example, Node, pack
from posttrain.config import DataConfig
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.readers import Record
from posttrain.data.report import Malformed
from posttrain.engines import Completion, Engine, Sampling, seed_of, text_of
from posttrain.errors import DataError
from posttrain.evaluation.items import FIELD, Item, fields_of, fill
from posttrain.models.families import positions_of
from posttrain.scoring import Scorer

CHOICE_PACK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion; with `problem`, there is none."""

    text: str
    tokens: int = 0
    finish_reason: str = ""
    seconds: float = 0.0
    problem: str | None = None


class Answers(Protocol):
    """Answers items, each with the same number of replies. `prompts` are what the model reads, by position."""

    @property
    def prompts(self) -> Mapping[int, str]: ...

    def __call__(self, items: Sequence[Item]) -> list[list[Reply]]: ...


def too_long(prompt: Prompt | Malformed, policy: PreTrainedModel) -> Malformed | None:
    """The reason why a prompt with more tokens than the model has positions cannot be completed; else None."""
    positions = positions_of(policy.config)
    if not isinstance(prompt, Prompt) or positions is None or len(prompt.tokens) <= positions:
        return None
    reason = f"the prompt has {len(prompt.tokens):,} tokens and the model {positions:,} positions: it leaves no room"
    return Malformed("", 0, reason, prompt.row)


def template_of(suite: SuiteConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The suite's template; `auto` is the tokenizer's own, or none."""
    if suite.template != "auto":
        return suite.template
    return "chat" if tokenizer.chat_template else "none"


def ask(
    suite: SuiteConfig, items: Sequence[Item], tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel
) -> dict[int, Prompt | Malformed]:
    """The prompt of every item by its position, rendered and tokenised as in training, or why it has none."""
    good = [item for item in items if item.problem is None]
    bad = {item.position: Malformed("", 0, item.problem or "", item.position) for item in items if item.problem}
    if not good:
        return dict(bad)
    data = DataConfig(
        source=suite.source,
        format="prompt",
        template=template_of(suite, tokenizer),
        system_prompt=suite.system_prompt,
    )
    records = [Record(item.position, suite.name, item.position + 1, {"prompt": item.prompt}) for item in good]
    before = tokenizer.chat_template
    try:
        asked = prompts_of(records, data, tokenizer, f"suite {suite.name}")
    finally:
        tokenizer.chat_template = before  # a run saves its tokenizer with its own template
    return bad | {item.position: too_long(one, policy) or one for item, one in zip(good, asked, strict=True)}


class Generated:
    """Completions of an engine. A completion's random numbers depend on the seed, the item and its number alone."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[int, Prompt | Malformed],
    ):
        self._engine, self._sampling, self._tokenizer, self._prompts = engine, sampling, tokenizer, prompts
        self.prompts = _texts(prompts)

    def __call__(self, items: Sequence[Item]) -> list[list[Reply]]:
        asked = [(item, one) for item in items if isinstance(one := self._prompts[item.position], Prompt)]
        began = time.perf_counter()
        seeds = [seed_of(self._sampling.seed, item.position) for item, _ in asked]
        groups = self._engine.generate([one.tokens for _, one in asked], self._sampling, seeds=seeds) if asked else []
        seconds = time.perf_counter() - began
        sampled = sum(len(completion.tokens) for group in groups for completion in group)
        replies = {
            item.position: [self._reply(completion, seconds / max(sampled, 1)) for completion in group]
            for (item, _), group in zip(asked, groups, strict=True)
        }
        return [replies.get(item.position) or self._none(item) for item in items]

    def _reply(self, completion: Completion, seconds_per_token: float) -> Reply:
        text = text_of(completion, self._sampling.stop_token_ids, self._tokenizer)
        count = len(completion.tokens)
        return Reply(text, count, completion.finish_reason, count * seconds_per_token)

    def _none(self, item: Item) -> list[Reply]:
        return [
            Reply("", problem=cast(Malformed, self._prompts[item.position]).reason)
        ] * self._sampling.num_generations


class Chosen:
    """The choice of the highest log-probability after the prompt, summed over its tokens."""

    def __init__(
        self,
        suite: SuiteConfig,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[int, Prompt | Malformed],
        device: torch.device,
    ):
        self._suite, self._scorer, self._tokenizer, self._device = suite, scorer, tokenizer, device
        self._prompts, self.prompts = prompts, _texts(prompts)

    @torch.no_grad()
    def __call__(self, items: Sequence[Item]) -> list[list[Reply]]:
        asked = [(item, one) for item in items if isinstance(one := self._prompts[item.position], Prompt)]
        began = time.perf_counter()
        examples = [
            Example((Node(one.tokens, False, tuple(Node(tokens, True) for tokens in self._choices(one))),), row=index)
            for index, (_, one) in enumerate(asked)
        ]
        scores: dict[int, list[float]] = {}
        longest = max((len(one.tokens) + 64 for _, one in asked), default=1)
        for packed in pack(examples, max(CHOICE_PACK_TOKENS, longest)) if examples else ():
            values = self._scorer(packed.to(self._device)).logprob_N.cpu().split(packed.length_S.tolist())
            for index, value in zip(packed.group_S.tolist(), values, strict=True):
                scores.setdefault(index, []).append(float(value.sum()))
        seconds = (time.perf_counter() - began) / max(len(asked), 1)
        best = {
            item.position: self._suite.choices[max(range(len(scores[index])), key=scores[index].__getitem__)]
            for index, (item, _) in enumerate(asked)
        }
        return [
            [Reply(best[item.position], 1, "stop", seconds)]
            if item.position in best
            else [Reply("", problem=cast(Malformed, self._prompts[item.position]).reason)]
            for item in items
        ]

    def _choices(self, prompt: Prompt) -> list[list[int]]:
        """The tokens of each choice after the prompt: tokenised together with it where that leaves its tokens alone."""

        def ids(text: str) -> list[int]:
            return self._tokenizer(text, add_special_tokens=False).input_ids

        alone = ids(prompt.text)
        whole = [ids(prompt.text + choice) for choice in self._suite.choices]
        return [
            tokens[len(alone) :] if tokens[: len(alone)] == alone and len(tokens) > len(alone) else ids(choice)
            for tokens, choice in zip(whole, self._suite.choices, strict=True)
        ]


class Recorded:
    """Completions of a file, matched to the items by the text of their questions."""

    def __init__(self, suite: SuiteConfig, rows: Sequence[Mapping[str, Any]], column: str, samples: int):
        self.prompts: Mapping[int, str] = {}
        self._suite, self._samples = suite, samples
        self._found: dict[str, list[str]] = {}
        for row in rows:
            texts = completions_of(row, column)
            if texts is not None:
                self._found.setdefault(self._question(fields_of(suite, row)), []).extend(texts)
        if not self._found:
            columns = ", ".join(rows[0]) if rows else "no rows"
            raise DataError(f"no row has a completion in {column}: there are {columns}; see --completion-column")

    def __call__(self, items: Sequence[Item]) -> list[list[Reply]]:
        none = Reply("", problem="there is no recorded completion")
        found = [self._found.get(self._question(item.fields), []) for item in items]
        return [[*map(Reply, texts[: self._samples]), *[none] * (self._samples - len(texts))] for texts in found]

    def most(self, items: Sequence[Item]) -> int:
        """The largest number of completions of an item."""
        return max((len(self._found.get(self._question(item.fields), ())) for item in items), default=0)

    def _question(self, fields: Mapping[str, Any]) -> str:
        names = [name for name in FIELD.findall(str(self._suite.prompt)) if name in fields and name != "shots"]
        return " ".join(fill("{" + name + "}", fields) for name in names).strip()


def completions_of(row: Mapping[str, Any], column: str) -> list[str] | None:
    """The completions of a row in a column, or at a dotted path: a string, or a list of strings or of {text}."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    values = value if isinstance(value, list) else [value]
    texts = [one.get("text") if isinstance(one, Mapping) else one for one in values]
    found = [text for text in texts if isinstance(text, str)]
    return found if found and len(found) == len(texts) else None


def _texts(prompts: Mapping[int, Prompt | Malformed]) -> dict[int, str]:
    return {position: one.text for position, one in prompts.items() if isinstance(one, Prompt)}
