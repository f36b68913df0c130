"""Answers to the items of a suite: completions of an engine, the likeliest choice, or recorded completions."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError, DataError
from posttrain.base.words import by_key
from posttrain.batch import Example, Node, Pack, physical_length
from posttrain.config import DataConfig
from posttrain.config.schema.suite import OF_ENVIRONMENT, SuiteConfig
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.readers import Record
from posttrain.data.report import Malformed
from posttrain.data.templates import choose_template
from posttrain.engines import Completion, Engine, Sampling, seed_of, stop_token_ids, text_of
from posttrain.environments.episode import start_of
from posttrain.environments.episodes import Episodes, Limits, acting
from posttrain.environments.trajectory import Trajectory
from posttrain.evaluation.items import FIELD, Item, fields_of, fill
from posttrain.grading.verdict import Grade
from posttrain.models.families import positions_of
from posttrain.scoring import Scorer, of_sequences

CHOICE_PACK_TOKENS = 8192
CHOSEN_AT_ONCE = 64  # items scored at a time


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion. One with a `grade` is not graded by the suite's rule: its environment graded it, or it failed."""

    text: str
    tokens: int = 0
    finish_reason: str = ""
    seconds: float = 0.0  # its share of the generation time
    grade: Grade | None = None
    episode: Mapping[str, Any] | None = None  # `Trajectory.stored`, of a reply after several turns

    @classmethod
    def of(
        cls, done: Completion, stops: Sequence[int], tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]
    ) -> "Reply":
        text = text_of(done, stops, tokenizer, prompt)
        return cls(text, len(done.tokens), done.finish_reason, done.seconds)

    @classmethod
    def failed(cls, reason: str, seconds: float = 0.0) -> "Reply":
        return cls("", seconds=seconds, grade=Grade("ungraded", reason=reason))


Found = Callable[[Item, list[Reply]], None]  # takes an item and its replies
Prompts = Mapping[int, Prompt | Malformed]  # by the position of the item: a prompt, or why there is none


class Answers(Protocol):
    """Answers items, each with the same number of replies. `prompts`: what the model reads, by position.

    `found` is called once per item, as soon as the item is answered; items may be answered in any order."""

    @property
    def prompts(self) -> Mapping[int, str]: ...

    def __call__(self, items: Sequence[Item], found: Found) -> None: ...


def template_of(suite: SuiteConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The suite's template. `auto`: the tokenizer's chat template or, without one, `none`."""
    if suite.template != "auto":
        return suite.template
    return "chat" if tokenizer.chat_template else "none"


def written_by(
    suite: SuiteConfig, tokenizer: PreTrainedTokenizerBase, date: str | None = None
) -> tuple[DataConfig, PreTrainedTokenizerBase]:
    """Return the settings and the tokenizer (with its template) that render the suite's prompts.

    For a suite with its own template or variables, the tokenizer is a copy: a run saves its own unchanged."""
    data = DataConfig(
        source=suite.source,
        format="prompt",
        template=template_of(suite, tokenizer),
        chat_template_kwargs=suite.chat_template_kwargs,
        date=date,
        system_prompt=suite.system_prompt,
    )
    if data.template not in ("chat", "none") or data.chat_template_kwargs:
        tokenizer = deepcopy(tokenizer)
        choose_template(data, tokenizer)
    return data, tokenizer


def stops_of(
    suite: SuiteConfig, policy: nn.Module, tokenizer: PreTrainedTokenizerBase, turns: bool = True
) -> tuple[int, ...]:
    """The tokens that end a completion of the suite's prompts; with `turns`, also a chat template's end of turn."""
    data, own = written_by(suite, tokenizer)
    ids = [*stop_token_ids(policy, tokenizer), *stop_token_ids(policy, own, turns and data.template != "none")]
    return tuple(dict.fromkeys(ids))


def ask(
    suite: SuiteConfig,
    items: Sequence[Item],
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel,
    date: str | None = None,
    behavior_version: int = 2,
) -> Prompts:
    """Render and tokenise the prompts of the items as in training.

    `date`: for templates that write the date; None: today. `behavior_version`: that of the run, if there is one.
    """
    good = [item for item in items if item.problem is None]
    bad = {item.position: Malformed("", 0, item.problem or "", item.position) for item in items if item.problem}
    if not good:
        return bad
    records = [Record(item.position, suite.name, item.position + 1, {"prompt": item.prompt}) for item in good]
    written, positions = written_by(suite, tokenizer, date), positions_of(policy.config)
    prompts = prompts_of(records, *written, f"suite {suite.name}", behavior_version, positions)
    return bad | {item.position: prompt for item, prompt in zip(good, prompts, strict=True)}


class _Prompted:
    """Answers by a model that reads prompts."""

    def __init__(self, prompts: Prompts):
        self._prompts = prompts
        self.prompts = {position: prompt.text for position, prompt in prompts.items() if isinstance(prompt, Prompt)}

    def _asked(self, items: Sequence[Item], found: Found, samples: int) -> list[tuple[Item, Prompt]]:
        """The items with a prompt; for the others, `found` is called with the reason."""
        asked: list[tuple[Item, Prompt]] = []
        for item in items:
            prompt = self._prompts[item.position]
            if isinstance(prompt, Prompt):
                asked.append((item, prompt))
            else:
                found(item, [Reply.failed(prompt.reason)] * samples)
        return asked


class Generated(_Prompted):
    """Answers by an engine. The random numbers of a completion depend only on the seed, the item and its own number."""

    def __init__(self, engine: Engine, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, prompts: Prompts):
        super().__init__(prompts)
        self._engine, self._sampling, self._tokenizer = engine, sampling, tokenizer

    def __call__(self, items: Sequence[Item], found: Found) -> None:
        asked = self._asked(items, found, self._sampling.num_generations)

        def finished(index: int, completions: Sequence[Completion]) -> None:
            item, prompt = asked[index]
            stops = self._sampling.stop_token_ids
            found(item, [Reply.of(done, stops, self._tokenizer, prompt.tokens) for done in completions])

        seeds = [seed_of(self._sampling.seed, item.position) for item, _ in asked]
        tokens = [prompt.tokens for _, prompt in asked]
        self._engine.generate(tokens, self._sampling, seeds=seeds, finished=finished)


def episodes_of(
    suite: SuiteConfig,
    engine: Engine,
    most: int,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    date: str | None = None,
    behavior_version: int = 3,
) -> AbstractContextManager[Episodes]:
    """Episodes with the suite's environments, of at most `most` tokens after the prompt. For errors, see `acting`;
    also raises ConfigError if the model has no room for a prompt."""
    limits = Limits.of(suite, suite.max_prompt_length, policy.config, most, behavior_version)
    if limits.max_prompt_length < 1:
        positions = positions_of(policy.config)
        raise ConfigError(
            f"suite {suite.name}: the model has {positions:,} positions, but max_completion_length is {most:,}, which "
            "leaves no room for a prompt: lower it"
        )
    return acting(suite.environments, suite.tools, engine, written_by(suite, tokenizer)[1], limits, date=date)


class Acted(_Prompted):
    """Answers by episodes, of which a reply is the last one. Raises ConfigError if they lack the suite's reward."""

    def __init__(self, suite: SuiteConfig, episodes: Episodes, sampling: Sampling, prompts: Prompts):
        super().__init__(prompts)
        self._suite, self._episodes, self._sampling = suite, episodes, sampling
        if suite.rule == OF_ENVIRONMENT and not any(kind.rewards for kind in episodes.environments.kinds.values()):
            raise ConfigError(f"suite {suite.name}: nothing rewards the episodes: give the class `get_reward`")

    def __call__(self, items: Sequence[Item], found: Found) -> None:
        n = self._sampling.num_generations
        asked = self._asked(items, found, n)
        at_once = max(1, 4 * self._episodes.environments.workers // n)  # items that are stored together
        for start in range(0, len(asked), at_once):
            some, began = asked[start : start + at_once], time.perf_counter()
            seeds = [seed_of(self._sampling.seed, item.position) for item, _ in some]
            starts = [start_of({"prompt": prompt.facts["prompt"], "columns": item.fields}) for item, prompt in some]
            groups = self._episodes.run(starts, n, replace(self._sampling, num_generations=1), seeds)
            seconds = (time.perf_counter() - began) / (n * len(some))
            for (item, _), group in zip(some, groups, strict=True):
                found(item, [self._reply(each, seconds) for each in group])

    def _reply(self, made: Trajectory, seconds: float) -> Reply:
        problem = None if made.has_verdict else f"{made.stop_reason}: {made.reason}"
        if problem is None and made.stop_reason == "context_overflow":
            most = self._episodes.limits.max_prompt_length
            problem = f"the prompt is too long: it has {len(made.prompt):,} tokens, at most {most:,} are allowed"
        elif problem is None and self._suite.rule == OF_ENVIRONMENT and made.reward is None:
            problem = "the environment has no reward"
        own = Grade("scored", made.reward) if self._suite.rule == OF_ENVIRONMENT else None
        grade = own if problem is None else Grade("ungraded", reason=problem)
        return Reply(made.answer, len(made.logprobs), made.finish_reason, seconds, grade, made.stored())


class Chosen(_Prompted):
    """Answers with the choice of the highest log-probability after the prompt, summed over the choice's tokens."""

    def __init__(
        self, suite: SuiteConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Prompts
    ):
        super().__init__(prompts)
        self._suite, self._scorer, self._tokenizer, self._device = suite, Scorer(policy), tokenizer, policy.device
        self._positions = positions_of(policy.config)

    def __call__(self, items: Sequence[Item], found: Found) -> None:
        asked = self._asked(items, found, 1)
        for start in range(0, len(asked), CHOSEN_AT_ONCE):
            some, began = asked[start : start + CHOSEN_AT_ONCE], time.perf_counter()
            built = [self._example(prompt) for _, prompt in some]
            examples = [example for example in built if isinstance(example, Example)]
            room = max([CHOICE_PACK_TOKENS, *(physical_length(example.trees[0]) for example in examples)])
            scores = iter(of_sequences(examples, self._scores, self._device, room))
            seconds = (time.perf_counter() - began) / max(len(examples), 1)
            for (item, _), example in zip(some, built, strict=True):
                failed = Reply.failed(example) if isinstance(example, str) else None
                found(item, [failed or self._reply(next(scores), seconds)])

    def _example(self, prompt: Prompt) -> Example | str:
        """A prompt followed by every choice, or the reason why the model cannot read them."""

        def ids(text: str) -> list[int]:
            return self._tokenizer(text, add_special_tokens=False).input_ids

        alone, choices = ids(prompt.text), list[list[int]]()
        for choice in self._suite.choices:  # tokenised after the prompt if that leaves the prompt's tokens unchanged
            tokens = ids(prompt.text + choice)
            after = tokens[: len(alone)] == alone and len(tokens) > len(alone)
            choices.append(tokens[len(alone) :] if after else ids(choice))
        fed = len(prompt.tokens) + max(map(len, choices)) - 1
        if self._positions is not None and fed > self._positions:
            return (
                f"a choice has no room: with the prompt {fed:,} tokens, but the model has {self._positions:,} positions"
            )
        return Example((Node(prompt.tokens, False, tuple(Node(tokens, True) for tokens in choices)),), row=prompt.row)

    def _scores(self, packed: Pack) -> list[float]:
        """The log-probability of each choice of a pack."""
        parts = self._scorer(packed).logprob_N.cpu().split(packed.length_S.tolist())
        return [float(logprob.sum()) for logprob in parts]

    def _reply(self, logprobs: Sequence[float], seconds: float) -> Reply:
        if not all(map(isfinite, logprobs)):
            return Reply.failed("the model's log-probabilities are not finite", seconds)
        return Reply(self._suite.choices[max(range(len(logprobs)), key=logprobs.__getitem__)], 1, "stop", seconds)


class Recorded:
    """Answers with the completions of a file, matched to the items by the text of their questions.

    If a question has as many rows as items, each item takes the completions of one row, in order; otherwise each takes
    those of all rows. `samples`: completions per item; None: the largest number that an item has. `unused`: the number
    of rows that no item takes, because they have no completion in `column` or a different question.
    """

    def __init__(
        self, suite: SuiteConfig, items: Sequence[Item], records: Sequence[Record], column: str, samples: int | None
    ):
        self.prompts: Mapping[int, str] = {}
        self._suite = suite
        rows: dict[str, list[list[str]]] = {}
        for record in records:
            texts = None if record.value is None else completions_of(record.value, column)
            if record.value is not None and texts is not None:
                rows.setdefault(self._question(fields_of(suite, record.value)), []).append(texts)
        if not rows:
            columns = ", ".join(next((record.value for record in records if record.value), ()))
            raise DataError(f"no row has a completion in {column}: the columns are {columns}; use --completion-column")
        by_question = by_key((self._question(item.fields), item) for item in items)
        self._completions: dict[int, list[str]] = {}
        for question, same in by_question.items():
            recorded = rows.get(question, [])
            every = [text for texts in recorded for text in texts]
            for index, item in enumerate(same):
                self._completions[item.position] = recorded[index] if len(recorded) == len(same) else every
        self.unused = len(records) - sum(len(rows.get(question, ())) for question in by_question)
        self.samples = samples or max([1, *map(len, self._completions.values())])

    def __call__(self, items: Sequence[Item], found: Found) -> None:
        none = Reply.failed("there is no recorded completion")
        for item in items:
            texts = self._completions[item.position][: self.samples]
            found(item, [*map(Reply, texts), *[none] * (self.samples - len(texts))])

    def _question(self, fields: Mapping[str, Any]) -> str:
        names = [name for name in FIELD.findall(str(self._suite.prompt)) if name in fields and name != "shots"]
        return " ".join(fill("{" + name + "}", fields) for name in names).strip()


def completions_of(row: Mapping[str, Any], column: str) -> list[str] | None:
    """A row's completions in a column or at a dotted path: a string, or a list of strings or of {text}; or None."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    values = value if isinstance(value, list) else [value]
    every = [value.get("text") if isinstance(value, Mapping) else value for value in values]
    texts = [text for text in every if isinstance(text, str)]
    return texts if texts and len(texts) == len(every) else None
