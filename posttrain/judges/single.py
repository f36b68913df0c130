"""A judge's score of one completion: a reward (`type: judge`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from posttrain.config.schema.judge import ScoreSettings
from posttrain.grading.verdict import EXTRACTED_CHARACTERS, Grade
from posttrain.judges.asking import Asked, Question, answers, ask
from posttrain.judges.client import JudgeClient, Message
from posttrain.judges.prompts import SINGLE, SINGLE_SYSTEM, Prompt, as_text, filled, read_score, with_reference


@dataclass(frozen=True, slots=True)
class JudgeInput:
    """A completion to be judged; `answer` is the right one, if it is known."""

    prompt: Prompt
    completion: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Judged(Grade):
    """A judge's verdict: `scored`, or timeout, crashed (any other failure) and bad_gold (no answer) without a score.

    `extracted` is the end of the reply. `unreadable`: the judge replied twice, without a score. `requests`: 0 if the
    reply was known.
    """

    unreadable: bool = False
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class SingleJudge:
    """Scores completions. Between `start` and `finish` the judge works, and the caller may do other things.

    Raises RewardError if it cannot be asked at all.
    """

    def __init__(self, settings: ScoreSettings):
        self.settings = settings
        self._client = JudgeClient(settings)

    def __call__(self, inputs: Sequence[JudgeInput], title: str = "") -> list[Judged]:
        """The verdict on each completion, in order; a title shows a progress bar."""
        return self.finish(self.start(inputs), title)

    def start(self, inputs: Sequence[JudgeInput]) -> list[Question | None]:
        """Ask about every completion; None where the prompt needs an answer that is missing."""
        return [None if self._lacks_answer(one) else ask(self._client, self._messages(one)) for one in inputs]

    def finish(self, started: Sequence[Question | None], title: str = "") -> list[Judged]:
        """The verdicts on what was started."""
        settings = self.settings
        wanted = '"[[rating]]"' if settings.read == "rating" else "the score in the form that was asked for"
        questions = [question for question in started if question is not None]
        found = iter(answers(self._client, questions, lambda text: read_score(text, settings), wanted, title))
        missing = Judged("bad_gold", reason="the row has no answer, and the judge's prompt has {answer}")
        return [missing if question is None else self._judged(next(found)) for question in started]

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lacks_answer(self, one: JudgeInput) -> bool:
        return one.answer is None and "{answer}" in (self.settings.prompt or "")

    def _messages(self, one: JudgeInput) -> list[Message]:
        own = self.settings.prompt
        template = with_reference(SINGLE, one.answer) if own is None else own
        system = SINGLE_SYSTEM if own is None and self.settings.system_prompt is None else self.settings.system_prompt
        values = {"prompt": as_text(one.prompt), "completion": one.completion, "answer": one.answer or ""}
        question = {"role": "user", "content": filled(template, values)}
        return [question] if system is None else [{"role": "system", "content": system}, question]

    def _judged(self, asked: Asked[float]) -> Judged:
        reply, settings = asked.reply, self.settings
        costs = (reply.failure == "unreadable", reply.requests, reply.prompt_tokens, reply.completion_tokens)
        said = reply.content[-EXTRACTED_CHARACTERS:]
        if asked.value is None:
            verdict = "timeout" if reply.failure == "timeout" else "crashed"
            return Judged(verdict, None, said or None, reply.seconds, {}, f"{reply.failure}: {reply.reason}", *costs)
        width = settings.max_score - settings.min_score
        score = (asked.value - settings.min_score) / width if settings.scale else asked.value
        return Judged("scored", score, said, reply.seconds, {}, None, *costs)
