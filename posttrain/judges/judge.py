"""Judges: `SingleJudge` scores one completion (`type: judge`), `PairJudge` says which of two is better.

The questions are in the style of MT-Bench (Zheng et al. 2023, arXiv 2306.05685, figures 5 to 10): they ask for a short
explanation, then the verdict in double square brackets. A pair is judged in both orders, because judges favour a
position (section 3.3). A reply that cannot be read is followed by a second question in the same conversation.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from posttrain.base.distributions import sign_test
from posttrain.base.files import table_beside
from posttrain.base.log import log
from posttrain.base.words import counted, filled
from posttrain.config.schema.judge import JudgeSettings, ScoreSettings
from posttrain.grading.extract import after_thinking, last_number
from posttrain.grading.verdict import EXTRACTED_CHARACTERS, Grade
from posttrain.judges.client import JudgeClient, Message, Reply

Prompt = str | Sequence[Mapping[str, Any]]
Better = Literal["a", "b", "tie"]
Result = Literal["win", "loss", "tie"]
COSTS = ("requests", "prompt_tokens", "completion_tokens")
TEXTS = table_beside(__file__, "prompts.yaml")
_RATING = re.compile(r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]")
_OUT_OF = re.compile(r"\s*/\s*\d+(?:\.\d+)?")  # 7/10 means 7
_PREFERENCE = re.compile(r"\[\[([ABC])\]\]")
MOST_OBJECTS = 100  # maximum number of braces in a reply at which a JSON object is sought


# --- questions --------------------------------------------------------------------------------------------------------


def built_in(name: str, answer: str | None) -> str:
    """A question of prompts.yaml, with a field for the reference answer (`{answer}`) if there is one."""
    parts = {part: TEXTS[part] * (answer is not None) for part in ("reference", "reference_rule")}
    return filled(TEXTS[name], parts)


def as_text(prompt: Prompt) -> str:
    """A prompt as one string. A single user message becomes its content; other conversations include the roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0].get("role") == "user":
        return str(prompt[0].get("content") or "")
    return "\n\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in prompt)


def read_score(text: str, settings: ScoreSettings) -> float | None:
    """The score in a reply, after its thinking; None if it has no score from min_score to max_score."""
    text = after_thinking(text)
    match settings.read:
        case "rating":
            found = next(reversed(_RATING.findall(text)), None)
        case "number":
            found = last_number(_OUT_OF.sub("", text))
        case "json":
            found = _field(text, settings.field or "score")
        case "regex":
            matches = list(re.finditer(settings.pattern or "", text))
            found = matches[-1][1] if matches else None
    score = _number(found)
    return score if score is not None and settings.min_score <= score <= settings.max_score else None


def read_preference(text: str) -> str | None:
    """The last verdict in double brackets after the thinking: A, B, or C for a tie; None if there is no verdict."""
    return next(reversed(_PREFERENCE.findall(after_thinking(text))), None)


def _field(text: str, name: str) -> Any:
    """The value of this field in the last JSON object of the text that has it."""
    decoder, found, at = json.JSONDecoder(), None, text.find("{")
    for _ in range(MOST_OBJECTS):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(text, at)
            found = value.get(name, found)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value.replace(",", "").strip(" $%") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that ends with a question, and the future of its reply."""

    messages: tuple[Message, ...]
    future: Future[Reply]


class _Judge(ExitStack):
    """Asks a model. Close it, or use it as a context manager."""

    def __init__(self, settings: JudgeSettings):
        super().__init__()
        self._client = JudgeClient(settings)
        self.callback(self._client.close)

    def _ask(self, messages: Sequence[Message]) -> Question:
        return Question(tuple(messages), self._client.submit(messages))

    def _replies(
        self, questions: Sequence[Question], read: Callable[[str], Any], wanted: str, title: str
    ) -> list[Reply]:
        """The replies with their values, in order. `wanted` tells the judge what a reply must contain; failures are
        logged by kind."""
        replies = self._client.gather([question.future for question in questions], title)
        found = [_read(reply, read) for reply in replies]
        again = {
            index: self._ask(_reminded(questions[index].messages, reply, wanted))
            for index, reply in enumerate(found)
            if reply.failure == "unreadable"
        }
        replies = self._client.gather([question.future for question in again.values()])
        for index, reply in zip(again, replies, strict=True):
            found[index] = _both(found[index], _read(reply, read))
        failed = [reply for reply in found if reply.failure]
        if failed:
            log.warning(
                "judge %s: no verdict on %d of %s (%s), e.g. %s",
                self._client.settings.model,
                len(failed),
                counted(len(found), "question"),
                ", ".join(f"{count} {kind}" for kind, count in Counter(reply.failure for reply in failed).items()),
                failed[0].reason,
            )
        return found


def _read(reply: Reply, read: Callable[[str], Any]) -> Reply:
    value = None if reply.failure else read(reply.content)
    if value is not None or reply.failure:
        return replace(reply, value=value)
    end = "…" + reply.content[-80:] if len(reply.content) > 80 else reply.content
    cut = " (cut off: raise max_tokens)" if reply.finish_reason == "length" else ""
    return replace(reply, failure="unreadable", reason=f"no verdict in {end!r}{cut}")


def _reminded(messages: Sequence[Message], reply: Reply, wanted: str) -> list[Message]:
    unreadable = {"role": "assistant", "content": reply.content or "(nothing)"}
    reminder = {"role": "user", "content": f"Your verdict is missing. Reply with {wanted} and no more."}
    return [*messages, unreadable, reminder]


def _both(first: Reply, second: Reply) -> Reply:
    """The second reply, with the costs of both."""
    costs = {name: getattr(first, name) + getattr(second, name) for name in (*COSTS, "seconds")}
    content = f"{first.content}\n{second.content}" if second.content else first.content
    return replace(second, content=content, **costs)


# --- one completion ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JudgeInput:
    """A completion to judge; `answer` is the right answer, if it is known."""

    prompt: Prompt
    completion: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Judged(Grade):
    """A judge's verdict: `scored`; or, without a score, timeout, crashed (any other failure) or bad_gold (no answer).

    `extracted` is the end of the reply. `unreadable`: the judge replied twice, but without a score. `requests`: 0 if
    the reply was stored.
    """

    unreadable: bool = False
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class SingleJudge(_Judge):
    """Scores completions. The judge works between `start` and `finish`, while the caller may do other things.

    Raises RewardError if no request can be made (missing API key, unusable cache, wrong settings)."""

    def __init__(self, settings: ScoreSettings):
        super().__init__(settings)
        self.settings = settings

    def __call__(self, inputs: Sequence[JudgeInput], title: str = "") -> list[Judged]:
        """The verdict on each completion, in order; shows a progress bar if `title` is given."""
        return self.finish(self.start(inputs), title)

    def start(self, inputs: Sequence[JudgeInput]) -> list[Question | None]:
        """Ask about every completion; None for a completion without the answer that the judge's prompt needs."""
        needs_answer = "{answer}" in (self.settings.prompt or "")
        return [None if one.answer is None and needs_answer else self._ask(self._messages(one)) for one in inputs]

    def finish(self, started: Sequence[Question | None], title: str = "") -> list[Judged]:
        """The verdicts on the completions given to `start`."""
        settings = self.settings
        wanted = '"[[rating]]"' if settings.read == "rating" else "the score in the form that was asked for"
        questions = [question for question in started if question is not None]
        found = iter(self._replies(questions, lambda text: read_score(text, settings), wanted, title))
        missing = Judged("bad_gold", reason="the row has no answer, but the judge's prompt has {answer}")
        return [missing if question is None else self._judged(next(found)) for question in started]

    def _messages(self, judged: JudgeInput) -> list[Message]:
        template, system = self.settings.prompt, self.settings.system_prompt
        if template is None:
            template = built_in("single", judged.answer)
            system = TEXTS["single_system"] if system is None else system
        values = {"prompt": as_text(judged.prompt), "completion": judged.completion}
        question = {"role": "user", "content": filled(template, values | {"answer": judged.answer or ""})}
        return [question] if system is None else [{"role": "system", "content": system}, question]

    def _judged(self, reply: Reply) -> Judged:
        settings = self.settings
        costs = (reply.failure == "unreadable", *(getattr(reply, name) for name in COSTS))
        end = reply.content[-EXTRACTED_CHARACTERS:]
        if reply.value is None:
            verdict = "timeout" if reply.failure == "timeout" else "crashed"
            return Judged(verdict, None, end or None, reply.seconds, {}, f"{reply.failure}: {reply.reason}", *costs)
        width = settings.max_score - settings.min_score
        score = (reply.value - settings.min_score) / width if settings.scale else reply.value
        return Judged("scored", score, end, reply.seconds, {}, None, *costs)


# --- pairs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """Two completions of a prompt; `answer` is the right answer, if it is known."""

    prompt: Prompt
    a: str
    b: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Preference:
    """The verdict on a pair, from the side of `a`. `result` is None if the judge gave no verdict in one of the orders.

    A win or a loss needs both orders to agree; anything else is a tie. `a_first` and `b_first` are the judge's verdicts
    with A, or B, shown first; `replies` are its replies, in the same order. Costs are the sums of both questions.
    """

    result: Result | None
    a_first: Better | None
    b_first: Better | None
    replies: tuple[str, str]
    reason: str | None
    requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of preferences. `win_rate` = (wins + ties / 2) / verdicts, NaN without a verdict.

    Position bias: `agree` counts pairs with the same verdict in both orders. Of the other pairs, `first` counts those
    for which the judge prefers the completion shown first, whichever it is, and `second` those for which it prefers the
    completion shown second; in the rest, one order is a tie. `bias_p` is the p-value of the exact two-sided binomial
    test of first = second.
    """

    wins: int
    losses: int
    ties: int
    without_verdict: int
    win_rate: float
    agree: int
    first: int
    second: int
    bias_p: float
    requests: int
    prompt_tokens: int
    completion_tokens: int


class PairJudge(_Judge):
    """Compares completions in pairs. Raises RewardError if no request can be made, like `SingleJudge`."""

    def compare(self, pairs: Sequence[Pair], title: str = "") -> list[Preference]:
        """The preference for each pair, in order; shows a progress bar if `title` is given."""
        questions = [self._ask(_messages(pair, swapped)) for pair in pairs for swapped in (False, True)]
        found = self._replies(questions, read_preference, '"[[A]]", "[[B]]" or "[[C]]"', title)
        return [_preference(found[at], found[at + 1]) for at in range(0, len(found), 2)]


def _messages(pair: Pair, swapped: bool) -> list[Message]:
    a, b = (pair.b, pair.a) if swapped else (pair.a, pair.b)
    values = {"prompt": as_text(pair.prompt), "a": a, "b": b, "answer": pair.answer or ""}
    return [
        {"role": "system", "content": built_in("pair_system", pair.answer)},
        {"role": "user", "content": filled(built_in("pair", pair.answer), values)},
    ]


def _preference(first: Reply, second: Reply) -> Preference:
    names: dict[str | None, Better | None] = {"A": "a", "B": "b", "C": "tie", None: None}
    swapped: dict[str | None, Better | None] = {"A": "b", "B": "a", "C": "tie", None: None}
    a_first, b_first = names[first.value], swapped[second.value]
    result: Result | None = None
    if a_first is not None and b_first is not None:
        result = ("win" if a_first == "a" else "loss") if a_first == b_first != "tie" else "tie"
    failed = next((f"{reply.failure}: {reply.reason}" for reply in (first, second) if reply.failure), None)
    costs = (getattr(first, name) + getattr(second, name) for name in COSTS)
    return Preference(result, a_first, b_first, (first.content, second.content), failed, *costs)


def summarise(preferences: Sequence[Preference]) -> Summary:
    """Wins, losses and ties, the position bias, and the costs."""
    results = Counter(preference.result for preference in preferences)
    wins, losses, ties = results["win"], results["loss"], results["tie"]
    verdicts = wins + losses + ties
    orders = Counter((one.a_first, one.b_first) for one in preferences if one.result is not None)
    agree = sum(count for (a_first, b_first), count in orders.items() if a_first == b_first)
    first, second = orders["a", "b"], orders["b", "a"]
    costs = (sum(getattr(preference, name) for preference in preferences) for name in COSTS)
    rate, bias_p = (wins + ties / 2) / verdicts if verdicts else math.nan, sign_test(first, second)[0]
    return Summary(wins, losses, ties, results[None], rate, agree, first, second, bias_p, *costs)
