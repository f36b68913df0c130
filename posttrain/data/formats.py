"""Data formats: one function per format, which turns the fields of a row into the common form of `rows.py`. To add a
format, write its function, and its fields in `formats.yaml`, under the same name."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as field_of
from typing import Any

from posttrain.base.errors import DataError
from posttrain.base.files import table_beside
from posttrain.base.words import last_box
from posttrain.data.render import PREFILL
from posttrain.data.rows import (
    Fields,
    Row,
    RowError,
    Turns,
    as_turns,
    field,
    messages_of,
    number_or_text,
    optional_text,
    text_of,
    text_or_messages,
    tools_of,
    with_system,
)
from posttrain.data.templates import Template

HH_TURN = re.compile(r"\n\n(Human|Assistant):")
THINK_TAGS = re.compile(r"</?think>")
# also matches thinking that the chat template opens (so only its end is here), and thinking that was cut off
THINKING = re.compile(r"\A(?:(?!<think>).)*?</think>\s*|<think>.*?(?:</think>\s*|\Z)", re.DOTALL)


def preference(fields: Fields, template: Template) -> Row:
    """`chosen` and `rejected` replies to `prompt`; without `prompt`, it is their common prefix, as in TRL."""
    chosen, rejected = (text_or_messages(field(fields, name), name) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("chosen and rejected must both be strings, or both lists of messages")
    prompt = fields.get("prompt")
    whole = not isinstance(chosen, str) and chosen[0]["role"] != "assistant"
    (margin, tie), tools = _margin_and_tie(fields), tools_of(fields.get("tools"))
    if prompt is None and not whole and "prompt" in fields:
        raise RowError("the pair has no prompt (null or missing), but other rows have one")
    if prompt is None and template.turns and isinstance(chosen, str):
        raise DataError(
            "the pair has no prompt, only strings with a common prefix, which a chat template cannot split into turns: "
            "name the prompt's column with data.columns: {prompt: YOUR_COLUMN}, or set data.template: none"
        )
    if prompt is None or whole:
        prompt, chosen, rejected = _common_prefix(chosen, rejected)
    else:
        prompt = _prefilled(text_or_messages(prompt, "prompt"))
        if isinstance(prompt, str) and not isinstance(chosen, str):
            prompt = as_turns(prompt, "user")
        elif isinstance(chosen, str) and not isinstance(prompt, str):
            chosen, rejected = as_turns(chosen, "assistant"), as_turns(rejected, "assistant")
    return Row(prompt, chosen, rejected, margin=margin, tie=tie, tools=tools)


def hh(fields: Fields, template: Template) -> Row:
    """Whole transcripts `\\n\\nHuman: … \\n\\nAssistant: …`; the prompt is everything before the last reply."""
    (prompt, chosen), (own, rejected) = (_split_transcript(fields, name) for name in ("chosen", "rejected"))
    own = None if prompt == own else own
    margin, tie = _margin_and_tie(fields)
    if not template.turns:
        return Row(prompt, chosen, rejected, own, margin, tie)
    best, other = (as_turns(reply.strip(), "assistant") for reply in (chosen, rejected))
    return Row(_transcript_turns(prompt), best, other, own and _transcript_turns(own), margin, tie)


def prompt_completion(fields: Fields, template: Template) -> Row:
    """`prompt` and `completion`, as strings or messages."""
    prompt, completion = (text_or_messages(field(fields, name), name) for name in ("prompt", "completion"))
    prompt = _prefilled(prompt)
    if isinstance(prompt, str) != isinstance(completion, str):
        prompt, completion = as_turns(prompt, "user"), as_turns(completion, "assistant")
    return Row(prompt, completion, tools=tools_of(fields.get("tools")))


def kto(fields: Fields, template: Template) -> Row:
    """`prompt`, `completion` and `label` (true: desirable), or `messages` and a `label` for the last reply."""
    label = _truth(field(fields, "label"), "label must be true or false (desirable or not)")
    if fields.get("messages") is None:
        return replace(prompt_completion(fields, template), label=label)
    turns = messages_of(fields["messages"], "messages")
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise RowError("messages must end with the assistant's labelled reply, after at least one other turn")
    return Row(turns[:-1], turns[-1:], tools=tools_of(fields.get("tools")), label=label)


def messages(fields: Fields, template: Template) -> Row:
    """`messages`: a conversation, with a `role` and `content` per message."""
    return Row(None, messages_of(field(fields, "messages"), "messages"), tools=tools_of(fields.get("tools")))


def sharegpt(fields: Fields, template: Template) -> Row:
    """`conversations` with `from` and `value`; with `chosen` and `rejected`, the row is a pair, as in LLaMA-Factory."""
    turns = messages_of(field(fields, "conversations"), "conversations")
    tools = tools_of(fields.get("tools"))
    if fields.get("chosen") is None and fields.get("rejected") is None:
        return Row(None, turns, tools=tools)
    chosen, rejected = (messages_of(field(fields, name), name) for name in ("chosen", "rejected"))
    margin, tie = _margin_and_tie(fields)
    return Row(_prefilled(turns), chosen, rejected, margin=margin, tie=tie, tools=tools)


def alpaca(fields: Fields, template: Template) -> Row:
    """`instruction`, `input` (may be empty), `output`, and `history` (earlier pairs of instruction and reply)."""
    instruction = text_of(field(fields, "instruction"), "instruction")
    context, output = optional_text(fields, "input"), text_of(field(fields, "output"), "output")
    content = f"{instruction}\n{context}" if context else instruction
    pairs = [] if fields.get("history") is None else fields["history"]
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise RowError("history must be a list of pairs [instruction, reply]")
    history = [
        {"role": role, "content": text_of(said, f"history[{index}]")}
        for index, pair in enumerate(pairs)
        for role, said in zip(("user", "assistant"), pair, strict=True)
    ]
    if not template.turns:
        if history:
            raise RowError("history is a conversation, which data.template: none cannot write: choose another template")
        return Row(f"{content}\n", output)
    user = {"role": "user", "content": content, "instruction": instruction, "input": context}
    return Row([*history, user], as_turns(output, "assistant"), train_history=bool(history))


def problem_answer(fields: Fields, template: Template) -> Row:
    """`problem` with `solution`, `answer` or both; one may contain the other: `… #### 72`, `\\boxed{72}`. Both may be
    lists: the first solution is used, and the answers are joined, so all of them are required."""
    problem = text_of(field(fields, "problem"), "problem")
    solutions, answers = (_listed(fields.get(name)) for name in ("solution", "answer"))
    solution = text_of(solutions[0], "solution") if solutions else ""
    answer = ", ".join(number_or_text(value, "answer") for value in answers)
    if not solution and not answer:
        raise RowError("solution and answer are both missing or empty")
    plain = solution or answer
    solution, answer = working_and_answer(solution, answer)
    if template.has_tags:
        solution, answer = (without_think_tags(text, bool(template.strip_think)) for text in (solution, answer))
    tagged = template.name in ("tags", "r1_zero", "question_only")
    reply = template.compose(solution, answer.strip()) if tagged else plain
    return Row(problem if template.turns else f"{problem}\n", reply, answer=answer.strip() or None)


def prompt(fields: Fields, template: Template) -> Row:
    """`prompt`, a string or messages for which completions are sampled; `answer` if a reward needs one."""
    prompt = _prefilled(text_or_messages(field(fields, "prompt"), "prompt"))
    answer = None if fields.get("answer") is None else number_or_text(fields["answer"], "answer")
    return Row(prompt, "" if isinstance(prompt, str) else [], tools=tools_of(fields.get("tools")), answer=answer)


def episode(fields: Fields, template: Template) -> Row:
    """Any columns: an environment's `reset` gives the messages, after an empty one of the user or the `prompt`."""
    row = prompt({"prompt": ""} | {name: value for name, value in fields.items() if value is not None}, template)
    return replace(row, prompt=as_turns(row.prompt, "user"), chosen=[]) if isinstance(row.prompt, str) else row


def text(fields: Fields, template: Template) -> Row:
    """`text`: a plain document; every token is trained on."""
    return Row(None, text_of(field(fields, "text"), "text"))


@dataclass(frozen=True, slots=True)
class Format:
    """A format's function and columns. `aliases` are other names that data sets use, with the fields that they mean."""

    of: Callable[[Fields, Template], Row]
    required: Sequence[str]
    optional: Sequence[str] = ()
    aliases: Mapping[str, str] = field_of(default_factory=dict)
    pairs: bool = False
    one_of: Sequence[str] = ()  # columns of which at least one is required

    def read(self, fields: Fields, template: Template) -> Row:
        """The row, with `system` as its first message. Raises RowError if it is malformed."""
        row, system = self.of(fields, template), optional_text(fields, "system")
        return with_system(row, system, beside=True) if system else row


def without_think_tags(text: str, strip: bool) -> str:
    """Remove `<think>` and `</think>` from a solution, for a template that writes different tags; with `strip`, also
    remove the text between them."""
    return THINK_TAGS.sub("", THINKING.sub("", text) if strip else text)


def working_and_answer(solution: str, answer: str) -> tuple[str, str]:
    """A problem's working and final answer, from its `solution` and `answer`, one of which may be empty."""
    if "####" in answer:
        working, _, last = answer.rpartition("####")
        return solution or working.rstrip(), last
    if not answer:
        if boxed := last_box(solution):
            return solution, boxed
        working, mark, last = solution.rpartition("####")
        if mark and last.strip() and "\n" not in last.strip():  # otherwise #### marks a heading
            return working.rstrip(), last
        return "", solution
    if boxed := last_box(answer):
        alone = answer.strip().removeprefix("\\boxed{").removesuffix("}").strip() == boxed
        return solution or ("" if alone else answer), boxed
    return solution, answer


_READERS = (
    preference, hh, sharegpt, kto, messages, alpaca, prompt_completion, problem_answer, prompt, text, episode,
)  # fmt: skip
_FIELDS = table_beside(__file__, "formats.yaml")
FORMATS: dict[str, Format] = {read.__name__: Format(read, **_FIELDS[read.__name__]) for read in _READERS}


def _prefilled(prompt: str | Turns) -> str | Turns:
    """Return a row's prompt; a last message from the assistant is marked as the beginning of the reply."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant" or prompt[-1].get("tool_calls"):
        return prompt
    return [*prompt[:-1], {**prompt[-1], PREFILL: True}]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _truth(value: object, what: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    shown = f"the string {value[:40]!r}" if isinstance(value, str) else repr(value)[:40]
    raise RowError(f"{what}, not {shown}")


def _margin_and_tie(fields: Fields) -> tuple[float | None, bool]:
    """By how much the chosen reply is better, and whether neither is better (a tie, which has no margin)."""
    value, tie = fields.get("margin"), fields.get("tie")
    try:
        margin = None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        raise RowError(f"margin must be a number, not {repr(value)[:40]}") from None
    if margin is not None and not math.isfinite(margin):
        raise RowError(f"margin must be a finite number, not {value!r}")
    tie = tie is not None and _truth(tie, "tie must be true or false")
    if tie and margin:
        raise RowError(f"tie is true, but margin says that chosen is better by {margin:g}")
    return margin, tie


def _common_prefix(chosen: str | Turns, rejected: str | Turns) -> tuple[str | Turns, str | Turns, str | Turns]:
    """Split two whole texts or conversations into their common prefix, the prompt, and two replies. Each reply keeps
    at least the last item, as in TRL."""
    shortest = min(len(chosen), len(rejected))
    if not shortest:
        return chosen[:0], chosen, rejected
    end = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest - 1)
    if end and end < shortest and chosen[end] != rejected[end] and chosen[end - 1] == " ":
        end -= 1  # the space belongs to the next word
    return chosen[:end], chosen[end:], rejected[end:]


def _split_transcript(fields: Fields, name: str) -> tuple[str, str]:
    """A transcript's prompt, up to and including the last `\\n\\nAssistant:`, and the reply after it."""
    whole = text_of(field(fields, name), name)
    prompt, mark, reply = whole.rpartition("\n\nAssistant:")
    if not mark:
        raise RowError(f"{name} has no `\\n\\nAssistant:` turn")
    if "\n\nHuman:" in reply:
        raise RowError(f"{name} does not end with the assistant's turn")
    return prompt + mark, reply


def _transcript_turns(prompt: str) -> Turns:
    """The messages of a transcript that ends where the assistant's turn begins."""
    pieces = HH_TURN.split(prompt)
    if pieces[0].strip():
        raise RowError("the transcript does not begin with `\\n\\nHuman:` or `\\n\\nAssistant:`")
    turns: Turns = []
    for speaker, said in zip(pieces[1:-2:2], pieces[2:-1:2], strict=True):
        turns.append({"role": "user" if speaker == "Human" else "assistant", "content": said.strip()})
    if not turns:
        raise RowError("the transcript has no turn before the reply")
    return turns
