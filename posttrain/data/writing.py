"""Writes rows as texts: each prompt as inference renders it, and the whole text that begins with this prompt.

A completion ends in the stop token, which is appended to texts, and to conversations that end in no special token.
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
class RowText:
    """A row's text (`whole`) and the text of its prompt, empty if there is none. `job` has the row's messages; those
    from index `replies` on are the reply. `stock` is their rendering, and `marks` are the character spans in it that
    `{% generation %}` marks.

    If `stock` writes the prompt differently from inference, the text is `prompt` followed by the reply of `stock`,
    which begins at `joint`. `end` is the stop token if it is appended.
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
    def whole(self) -> str:
        return (self.stock if self.joint is None else self.prompt + self.stock[self.joint :]) + self.end

    @property
    def moved(self) -> int:
        """The number of characters by which the reply begins later in the text than in `stock`."""
        return 0 if self.joint is None else len(self.prompt) - self.joint


Texts = Sequence[RowText | RowError]


@dataclass
class RowWriter:
    """Writes rows for one tokenizer, and counts what its template omits. Without a `renderer`, texts stay as they are.

    With `behavior_version` 1, a prompt may differ from the prompt at inference, and turns are located by an older rule.
    """

    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer | None
    assistant_only_loss: bool
    behavior_version: int

    def __post_init__(self) -> None:
        self.stop = str(self.tokenizer.eos_token or "")
        special = tuple(token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        self.endings = Endings(special, self.stop)
        template = "" if self.renderer is None else str(self.tokenizer.chat_template)
        self.names = set(re.findall(r"\w+", template))
        self.marked = bool(GENERATION.search(template))
        self.unwritten: Counter[str] = Counter()  # number of rows by the part that the template does not write

    def prompts(self, rows: Sequence[Row]) -> Texts:
        """Each row's prompt as the model sees it before it replies."""
        if self.renderer is None:
            return [_plainly(row.prompt, None, stop="") for row in rows]
        jobs = [_prompt_job(row, row.prompt) for row in rows]
        done = zip(jobs, self.renderer.render(jobs), strict=True)
        texts = [_error(result) or RowText(result.text, result.text, job, job) for job, result in done]
        return self._finished(self.renderer, texts)

    def with_prompts(self, parts: Sequence[tuple[Row, str | Turns | None, str | Turns]]) -> Texts:
        """The text of each (prompt, reply), and of its prompt as the model sees it before it replies."""
        if self.renderer is None:
            return [_plainly(prompt, reply, self.stop) for _, prompt, reply in parts]
        prompt_jobs = {(id(row), id(prompt)): _prompt_job(row, prompt) for row, prompt, _ in parts}
        jobs = [self._job(row, _joined(prompt, reply)) for row, prompt, reply in parts]
        done = self.renderer.render([*prompt_jobs.values(), *jobs])
        prompts = dict(zip(prompt_jobs, done, strict=False))
        out: list[RowText | RowError] = []
        for (row, prompt, reply), job, whole in zip(parts, jobs, done[len(prompts) :], strict=True):
            key = id(row), id(prompt)
            before, replies = prompts[key], len(job.messages) - len(_turns(reply, "assistant"))
            written = RowText(before.text, whole.text, job, prompt_jobs[key], replies, marks=whole.spans)
            out.append(_error(before) or self._refusal(job, whole) or written)
        return self._finished(self.renderer, self._agreed(self.renderer, out) if self.behavior_version > 1 else out)

    def conversations(self, rows: Sequence[Row]) -> Texts:
        """Whole conversations, or texts. If a conversation ends with an assistant turn and the template does not write
        all its messages, the text before that turn is what the model sees before it replies."""
        if self.renderer is None:
            return self.documents(rows)
        jobs = [self._job(row, cast(Turns, row.chosen)) for row in rows]
        done = zip(jobs, self.renderer.render(jobs), strict=True)
        texts = [
            self._refusal(job, whole) or RowText("", whole.text, job, job, marks=whole.spans) for job, whole in done
        ]
        out = [*self._finished(self.renderer, texts)]
        good = ((n, text) for n, text in _good(out) if text.job.messages[-1]["role"] == "assistant")
        lossy = [n for n, text in good if text.missing - {TOOLS, THINKING}]
        parts = [(rows[n], rows[n].chosen[:-1], rows[n].chosen[-1:]) for n in lossy]
        for n, text in zip(lossy, self.with_prompts(parts), strict=True):
            if isinstance(text, RowText) and text.joint is not None:
                out[n] = text
        return out

    def documents(self, rows: Sequence[Row]) -> Texts:
        """Texts without a prompt, unchanged except for the stop token."""
        return [_plainly(None, row.chosen, self.stop) for row in rows]

    def count(self, rows: Sequence[Row], texts: Texts) -> None:
        """Count the parts of each row that the template does not write. A row has one text, a pair has two."""
        each = len(texts) // max(len(rows), 1)
        for index, row in enumerate(rows):
            of_row = texts[each * index : each * (index + 1)]
            lost = {what for _, text in _good(of_row) for what in text.missing}
            lost |= {f"{VARIABLE}{name}" for name in row.variables or () if name not in self.names}
            self.unwritten.update(sorted(lost))

    def assistants(self, rows: Sequence[Row], texts: Texts) -> list[list[Span]]:
        """The character spans of the assistant's turns, in rows that are trained on these turns: as the template marks
        them with `{% generation %}`, or as located by rendering."""
        trained = [self.assistant_only_loss or row.train_history for row in rows]
        if not any(trained):
            return [[] for _ in rows]
        if not self.tokenizer.is_fast:
            raise DataError("assistant_only_loss and history need a fast tokenizer, which maps tokens to characters")
        if self.renderer is None:
            raise DataError(
                "method.assistant_only_loss needs conversations, but data.template is none, which has no turns"
            )
        if not self.marked:
            located = self._located(self.renderer, texts, lambda n, turn: trained[n] and turn["role"] == "assistant")
            return [[*spans.values()] for spans in located]
        out: list[list[Span]] = [[] for _ in rows]
        for n, text in _good(texts):
            spans = [(a + text.moved, b + text.moved) for a, b in text.marks if a >= (text.joint or 0)]
            if spans and text.end:  # the last turn includes the stop token after it
                spans[-1] = spans[-1][0], len(text.whole)
            elif spans and self.assistant_only_loss and text.job.messages[-1]["role"] == "assistant":
                self.unwritten.update([END] if text.whole[spans[-1][1] :].strip() else [])
            out[n] = spans
        return out

    def weights(self, texts: Texts) -> list[list[tuple[Span, float]] | None]:
        """The character span and loss weight of each weighted message; None for a row without weights."""
        if self.renderer is None:  # prompt and reply are one message each; only the reply is located
            located: list[dict[int, Span]] = [{} for _ in texts]
            for n, text in _good(texts):
                located[n] = {len(text.job.messages) - 1: (len(text.prompt), len(text.whole))}
        else:
            located = self._located(self.renderer, texts, lambda _, message: WEIGHT in message)
        out: list[list[tuple[Span, float]] | None] = [None for _ in texts]
        for n, text in _good(texts):
            if any(WEIGHT in turn for turn in text.job.messages):
                weight_of = {i: turn.get(WEIGHT, ("", 1.0))[1] for i, turn in enumerate(text.job.messages)}
                out[n] = [(span, weight_of[index]) for index, span in located[n].items()]
        return out

    def _located(
        self, renderer: Renderer, texts: Texts, which: Callable[[int, Message], bool]
    ) -> list[dict[int, Span]]:
        """The character spans, by message index, of the messages for which `which(row index, message)` is true."""
        parts: list[tuple[int, int, Part]] = []
        for n, text in _good(texts):
            selected = [index for index, message in enumerate(text.job.messages) if which(n, message)]
            border = 0 if text.joint is None else text.replies
            before, after = ([i for i in selected if (i < border) == first] for first in (True, False))
            parts += [(n, 0, Part(text.prompt_job, text.prompt, before))] if before else []
            parts += [(n, text.moved, Part(text.job, text.stock, after))] if after else []
        located = locate(renderer, [part for *_, part in parts], self.endings, old=self.behavior_version == 1)
        out: list[dict[int, Span]] = [{} for _ in texts]
        for (n, moved, _), spans in zip(parts, located, strict=True):
            out[n] |= {index: (start + moved, stop + moved) for index, (start, stop) in spans.items()}
        for n, text in _good(texts):
            if (last := len(text.job.messages) - 1) in out[n]:
                out[n][last] = out[n][last][0], len(text.whole)  # including the stop token after it
        return out

    def _agreed(self, renderer: Renderer, texts: Texts) -> Texts:
        """Each text with its prompt as inference renders it, up to the reply's opening, or why that is impossible."""
        out = list(texts)
        apart = [
            (n, text) for n, text in _good(texts) if text.prompt_job.generate and not text.stock.startswith(text.prompt)
        ]
        bare = renderer.render([replace(text.prompt_job, generate=False) for _, text in apart])
        apart = [
            (n, text)
            for (n, text), before in zip(apart, bare, strict=True)
            if common_prefix(text.stock, text.prompt)
            < (len(text.prompt) if before.error else common_prefix(before.text, text.prompt))
        ]
        located = locate(renderer, [Part(text.job, text.stock, [text.replies]) for _, text in apart], self.endings)
        for (n, text), spans in zip(apart, located, strict=True):
            if text.replies in spans and text.job.messages[text.replies]["role"] == "assistant":
                out[n] = replace(text, joint=spans[text.replies][0])
            else:
                out[n] = RowError(
                    "the chat template writes the prompt differently when the reply follows, and the reply cannot be "
                    "located: choose another template with data.template"
                )
        return out

    def _finished(self, renderer: Renderer, texts: Texts) -> Texts:
        """The texts with `missing` and `end` set: what the template does not write, and the stop token if needed."""
        good, out = _good(texts), list(texts)
        read = [(text.job, text.stock) if text.joint is None else (text.prompt_job, text.prompt) for _, text in good]
        for (n, text), missing in zip(good, unwritten(renderer, read), strict=True):
            ended = text.whole.rstrip().endswith(self.endings.special)  # any special token serves as a stop token
            open_ended = text.job.generate or text.job.continued or text.job.messages[-1]["role"] != "assistant"
            end = "" if ended or open_ended or text.whole.endswith(self.stop) else self.stop
            out[n] = replace(text, end=end, missing=missing)
        return out

    def _refusal(self, job: RenderRequest, done: Rendered) -> RowError | None:
        """The reason why a conversation cannot be used: the template's error or, with behavior_version 1, that it
        begins with an assistant turn although turns are located by rendering."""
        by_rendering = self.assistant_only_loss and not self.marked
        if self.behavior_version == 1 and by_rendering and not done.error and job.messages[0]["role"] == "assistant":
            return RowError("begins with an assistant turn, whose opening is only known after another turn")
        return _error(done)

    def _job(self, row: Row, messages: Turns) -> RenderRequest:
        spans = self.marked and (self.assistant_only_loss or row.train_history)
        return RenderRequest(messages, row.tools, spans=spans, variables=row.variables)


def _good(texts: Texts) -> list[tuple[int, RowText]]:
    """The texts that could be written, with their positions."""
    return [(n, text) for n, text in enumerate(texts) if isinstance(text, RowText)]


def _prompt_job(row: Row, prompt: str | Turns | None) -> RenderRequest:
    """The request for a prompt, which ends with the opening of the reply, or with a prefill if the prompt has one."""
    turns = _turns(prompt)
    continued = bool(turns) and PREFILL in turns[-1]
    return RenderRequest(turns, row.tools, generate=not continued, continued=continued, variables=row.variables)


def _error(done: Rendered) -> RowError | None:
    return RowError(done.error) if done.error else None


def _plainly(prompt: str | Turns | None, reply: str | Turns | None, stop: str) -> RowText | RowError:
    """Prompt and reply concatenated without a template; if they are messages, each must be a single message."""
    before, after = _turns(prompt), _turns(reply, "assistant")
    for value, turns in ((prompt, before), (reply, after)):
        if value is not None and (len(turns) != 1 or turns[0].get("tool_calls")):
            return RowError("a conversation of several turns cannot be written with data.template: none")
    job = RenderRequest([*before, *after])
    first, text = ("".join(turn["content"] for turn in turns) for turns in (before, job.messages))
    return RowText(first, text, job, job, end="" if text.endswith(stop) else stop)


def _turns(value: str | Turns | None, role: str = "user") -> Turns:
    return [] if value is None else as_turns(value, role)


def _joined(prompt: str | Turns | None, reply: str | Turns) -> Turns:
    """The conversation of a prompt and its reply; if the prompt ends with a prefill, the reply continues it."""
    before, after = _turns(prompt), _turns(reply, "assistant")
    if not before or PREFILL not in before[-1] or not after or after[0]["role"] != "assistant":
        return [*before, *after]
    content = before[-1]["content"] + after[0]["content"]
    return [*before[:-1], {**before[-1], **after[0], "content": content}, *after[1:]]
