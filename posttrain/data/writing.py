"""Rows as texts: each prompt as inference has it, and the whole that begins with it.

A completion ends in the stop token: appended to texts, and to conversations whose template ends in no special token.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.data.render import PREFILL, WEIGHT, Message, Rendered, Renderer, RenderRequest
from posttrain.data.rows import Row, RowError, Turns, as_turns
from posttrain.data.turns import END, THINKING, TOOLS, VARIABLE, Endings, Part, Span, common_prefix, locate, unwritten

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Written:
    """A row's text and its prompt's, empty without one. `job` has its messages, of which those from `replies` on are
    the reply; `stock` is their rendering, and `marks` the characters that `{% generation %}` marks in it.

    Where `stock` writes the prompt otherwise than inference has it, the text is `prompt`, and from `joint` on what
    `stock` has of the reply. `end` is the stop token if it is appended.
    """

    prompt: str
    stock: str
    job: RenderRequest
    prompt_job: RenderRequest
    replies: int = 0
    joint: int | None = None
    end: str = ""
    marks: tuple[Span, ...] = ()
    missing: frozenset[str] = frozenset()  # what the template does not write (`unwritten`)

    @property
    def text(self) -> str:
        return (self.stock if self.joint is None else self.prompt + self.stock[self.joint :]) + self.end

    @property
    def moved(self) -> int:
        """How many characters further on than in `stock` the reply begins in the text."""
        return 0 if self.joint is None else len(self.prompt) - self.joint


Texts = Sequence[Written | RowError]


class Writer:
    """Writes rows for one tokenizer, and counts what its template loses. `renderer` is None when texts are used as they
    are.

    With `behavior_version` 1 a prompt may differ from that of inference, and turns are found as `locate` once did.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Renderer | None,
        assistant_only_loss: bool,
        behavior_version: int,
    ):
        self.renderer = renderer
        self.assistant_only_loss = assistant_only_loss
        self.behavior_version = behavior_version
        self.is_fast = tokenizer.is_fast
        self.stop = str(tokenizer.eos_token or "")
        special = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self.endings = Endings(special, self.stop)
        template = "" if renderer is None else str(tokenizer.chat_template)
        self.names = set(re.findall(r"\w+", template))
        self.marked = bool(GENERATION.search(template))
        self.unwritten: Counter[str] = Counter()  # rows by what the template does not write of them

    def prompts(self, rows: Sequence[Row]) -> Texts:
        """Each row's prompt as the model sees it before it answers."""
        if self.renderer is None:
            return [_plainly(row.prompt, None, stop="") for row in rows]
        jobs = [_prompt_job(row, row.prompt) for row in rows]
        done = self.renderer.render(jobs)
        written = [_error(one) or Written(one.text, one.text, job, job) for job, one in zip(jobs, done, strict=True)]
        return self._finished(self.renderer, written)

    def with_prompts(self, parts: Sequence[tuple[Row, str | Turns | None, str | Turns]]) -> Texts:
        """The text of each (prompt, reply), and its prompt's as the model sees it before it answers."""
        if self.renderer is None:
            return [_plainly(prompt, reply, self.stop) for _, prompt, reply in parts]
        asked = {(id(row), id(prompt)): _prompt_job(row, prompt) for row, prompt, _ in parts}
        jobs = [self._job(row, _joined(prompt, reply)) for row, prompt, reply in parts]
        done = self.renderer.render([*asked.values(), *jobs])
        prompts = dict(zip(asked, done, strict=False))
        out: list[Written | RowError] = []
        for (row, prompt, reply), job, whole in zip(parts, jobs, done[len(asked) :], strict=True):
            key = id(row), id(prompt)
            before, replies = prompts[key], len(job.messages) - len(_turns(reply, "assistant"))
            written = Written(before.text, whole.text, job, asked[key], replies, marks=whole.spans)
            out.append(_error(before) or self._refusal(job, whole) or written)
        return self._finished(self.renderer, self._agreed(self.renderer, out) if self.behavior_version > 1 else out)

    def conversations(self, rows: Sequence[Row]) -> Texts:
        """Whole conversations, or texts. Where the template loses a message's text of one that ends with the
        assistant's turn, what is before it is as the model sees it."""
        if self.renderer is None:
            return self.documents(rows)
        jobs = [self._job(row, cast(Turns, row.chosen)) for row in rows]
        done = zip(jobs, self.renderer.render(jobs), strict=True)
        written = [self._refusal(job, one) or Written("", one.text, job, job, marks=one.spans) for job, one in done]
        out = [*self._finished(self.renderer, written)]
        lossy = [
            n
            for n, one in _good(out)
            if one.missing - {TOOLS, THINKING} and one.job.messages[-1]["role"] == "assistant"
        ]
        parts = [(rows[n], rows[n].chosen[:-1], rows[n].chosen[-1:]) for n in lossy]
        for n, one in zip(lossy, self.with_prompts(parts), strict=True):
            if isinstance(one, Written) and one.joint is not None:
                out[n] = one
        return out

    def documents(self, rows: Sequence[Row]) -> Texts:
        """Texts without a prompt, as they are."""
        return [_plainly(None, row.chosen, self.stop) for row in rows]

    def count(self, rows: Sequence[Row], written: Texts) -> None:
        """Count what the template does not write of each row, which has one text, or of a pair two."""
        each = len(written) // max(len(rows), 1)
        for index, row in enumerate(rows):
            texts = written[each * index : each * (index + 1)]
            lost = {what for _, one in _good(texts) for what in one.missing}
            lost |= {f"{VARIABLE}{name}" for name in row.variables or () if name not in self.names}
            self.unwritten.update(sorted(lost))

    def assistants(self, rows: Sequence[Row], written: Texts) -> list[list[Span]]:
        """The characters of the assistant's turns, in rows where these are trained: those that the template marks with
        `{% generation %}`, or those found by rendering."""
        wanted = [self._finds_turns(row) for row in rows]
        if not any(wanted):
            return [[] for _ in rows]
        if not self.is_fast:
            raise DataError(
                "assistant_only_loss and history need a fast tokenizer, which knows the characters of each token"
            )
        if self.renderer is None:
            raise DataError(
                "method.assistant_only_loss needs conversations, but data.template is none, which has no turns"
            )
        if not self.marked:
            found = self._placed(self.renderer, written, lambda n, turn: wanted[n] and turn["role"] == "assistant")
            return [[*spans.values()] for spans in found]
        out: list[list[Span]] = [[] for _ in rows]
        for n, one in _good(written):
            spans = [(a + one.moved, b + one.moved) for a, b in one.marks if a >= (one.joint or 0)]
            if spans and one.end:  # the last turn owns the stop token after it
                spans[-1] = spans[-1][0], len(one.text)
            elif spans and self.assistant_only_loss and one.job.messages[-1]["role"] == "assistant":
                self.unwritten.update([END] if one.text[spans[-1][1] :].strip() else [])
            out[n] = spans
        return out

    def weights(self, written: Texts) -> list[list[tuple[Span, float]] | None]:
        """The characters of the messages with a loss weight, and these; None for a row without any."""
        said = [[] if isinstance(one, RowError) else one.job.messages for one in written]
        if self.renderer is None:  # a message each, of which only the reply has a text of its own
            whole = [(0, 0) if isinstance(one, RowError) else (len(one.prompt), len(one.text)) for one in written]
            placed = [{len(turns) - 1: span} if turns else {} for turns, span in zip(said, whole, strict=True)]
        else:
            placed = self._placed(self.renderer, written, lambda _, message: WEIGHT in message)
        return [
            [(span, turns[index].get(WEIGHT, ("", 1.0))[1]) for index, span in spans.items()]
            if any(WEIGHT in turn for turn in turns)
            else None
            for turns, spans in zip(said, placed, strict=True)
        ]

    def _placed(
        self, renderer: Renderer, written: Texts, which: Callable[[int, Message], bool]
    ) -> list[dict[int, Span]]:
        """The characters of the messages that `which` selects, by their index; it is called with the row's index."""
        parts: list[tuple[int, int, Part]] = []
        for n, one in _good(written):
            chosen = [index for index, message in enumerate(one.job.messages) if which(n, message)]
            apart = 0 if one.joint is None else one.replies
            before, after = ([i for i in chosen if (i < apart) == first] for first in (True, False))
            parts += [(n, 0, Part(one.prompt_job, one.prompt, before))] if before else []
            parts += [(n, one.moved, Part(one.job, one.stock, after))] if after else []
        located = locate(renderer, [part for *_, part in parts], self.endings, old=self.behavior_version == 1)
        out: list[dict[int, Span]] = [{} for _ in written]
        for (n, moved, _), spans in zip(parts, located, strict=True):
            out[n] |= {index: (start + moved, stop + moved) for index, (start, stop) in spans.items()}
        for n, one in _good(written):
            if (last := len(one.job.messages) - 1) in out[n]:
                out[n][last] = out[n][last][0], len(one.text)  # with the stop token after it
        return out

    def _agreed(self, renderer: Renderer, written: Texts) -> Texts:
        """Each text such that its prompt is as inference has it, up to the reply's opening; or why it cannot be."""
        out = list(written)
        apart = [
            (n, one) for n, one in _good(written) if one.prompt_job.generate and not one.stock.startswith(one.prompt)
        ]
        bare = renderer.render([replace(one.prompt_job, generate=False) for _, one in apart])
        apart = [
            (n, one)
            for (n, one), before in zip(apart, bare, strict=True)
            if common_prefix(one.stock, one.prompt)
            < (len(one.prompt) if before.error else common_prefix(before.text, one.prompt))
        ]
        found = locate(renderer, [Part(one.job, one.stock, [one.replies]) for _, one in apart], self.endings)
        for (n, one), spans in zip(apart, found, strict=True):
            if one.replies in spans and one.job.messages[one.replies]["role"] == "assistant":
                out[n] = replace(one, joint=spans[one.replies][0])
            else:
                out[n] = RowError(
                    "the chat template writes the prompt differently once the reply follows, and the reply cannot be "
                    "found there: choose another with data.template"
                )
        return out

    def _finished(self, renderer: Renderer, written: Texts) -> Texts:
        """The texts with the stop token where the template ends in none, and what of them it does not write."""
        good, out = _good(written), list(written)
        read = [(one.job, one.stock) if one.joint is None else (one.prompt_job, one.prompt) for _, one in good]
        for (n, one), missing in zip(good, unwritten(renderer, read), strict=True):
            ended = one.text.rstrip().endswith(self.endings.special)  # any special token is as good as the stop token
            open_ended = one.job.generate or one.job.continued or one.job.messages[-1]["role"] != "assistant"
            end = "" if ended or open_ended or one.text.endswith(self.stop) else self.stop
            out[n] = replace(one, end=end, missing=missing)
        return out

    def _refusal(self, job: RenderRequest, done: Rendered) -> RowError | None:
        """Why a conversation cannot be used: the template's error; in runs of behavior_version 1 a first turn of the
        assistant, where turns are found by rendering."""
        found = self.assistant_only_loss and not self.marked
        if self.behavior_version == 1 and found and not done.error and job.messages[0]["role"] == "assistant":
            return RowError("begins with the assistant's turn, whose opening is only known after another turn")
        return _error(done)

    def _finds_turns(self, row: Row) -> bool:
        return self.assistant_only_loss or row.train_history

    def _job(self, row: Row, messages: Turns) -> RenderRequest:
        return RenderRequest(messages, row.tools, spans=self.marked and self._finds_turns(row), variables=row.variables)


def _good(written: Texts) -> list[tuple[int, Written]]:
    """The texts that are written, with their positions."""
    return [(n, one) for n, one in enumerate(written) if isinstance(one, Written)]


def _prompt_job(row: Row, prompt: str | Turns | None) -> RenderRequest:
    """A prompt with the opening of its reply, or with the beginning of the reply that it has (a prefill)."""
    turns = _turns(prompt)
    continued = bool(turns) and PREFILL in turns[-1]
    return RenderRequest(turns, row.tools, generate=not continued, continued=continued, variables=row.variables)


def _error(done: Rendered) -> RowError | None:
    return RowError(done.error) if done.error else None


def _plainly(prompt: str | Turns | None, reply: str | Turns | None, stop: str) -> Written | RowError:
    """Prompt and reply without a template, concatenated: of messages, one each."""
    before, after = _turns(prompt), _turns(reply, "assistant")
    for given, turns in ((prompt, before), (reply, after)):
        if given is not None and (len(turns) != 1 or turns[0].get("tool_calls")):
            return RowError("a conversation of several turns cannot be written with data.template: none")
    job = RenderRequest([*before, *after])
    first, text = ("".join(turn["content"] for turn in turns) for turns in (before, job.messages))
    return Written(first, text, job, job, end="" if text.endswith(stop) else stop)


def _turns(value: str | Turns | None, role: str = "user") -> Turns:
    return [] if value is None else as_turns(value, role)


def _joined(prompt: str | Turns | None, reply: str | Turns) -> Turns:
    """The conversation of a prompt and its reply, which ends the prompt's last message where that is a prefill."""
    before, said = _turns(prompt), _turns(reply, "assistant")
    if not before or PREFILL not in before[-1] or not said or said[0]["role"] != "assistant":
        return [*before, *said]
    return [*before[:-1], {**before[-1], **said[0], "content": before[-1]["content"] + said[0]["content"]}, *said[1:]]
