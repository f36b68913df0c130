"""A chat template as a table: the text between two messages by their roles. Engines without Jinja are given this form.

Most chat templates (ChatML, Llama 2 to 3, Zephyr, Gemma, Mistral, those of posttrain …) write each message's content
as it is, between texts that depend only on the roles before and after. The table is found by rendering conversations
with the template itself and is compared with it on others; a template of another kind is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from posttrain.data.render import Message, Renderer, RenderRequest, rendering
from posttrain.errors import ModelError

START, REPLY, LAST = "", "reply", "last"  # no message before; the opening of a reply; a reply that is to be continued
ROLES = {"s": "system", "u": "user", "a": "assistant"}
# The conversations that the table comes from, by the first letters of their roles. A template may refuse the others.
NEEDED = ("u", "uau", "uauau")
OPTIONAL = ("su", "suau", "suauau", "usu", "uasu", "uausu", "au", "sau", "auau")
CONTENTS = (
    ("Hello!", "Hi, what can I do?", "And now?"),
    ("2 < 3 & {{ braces }} {% tags %} \"quotes\" 'single' \\n", "Straße 你好 🙂\ttab", "line\n\nline\n- item"),
)
SPACES = ("  two spaces before", "and after  ", "\nlines around\n")
THOUGHTS = ("Why?", "<think>\nBecause.\n</think>\n\nSo.", "And?")


class InexpressibleError(ModelError):
    """A chat template that is no table of texts between roles."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The table: (role before, role after) -> the text between their contents.

    The role before is START at the first message; the role after is REPLY for the text that opens a reply to generate,
    and LAST for an unfinished reply at the end, if its opening differs from that of earlier ones. Pairs that are
    missing are refused by the template. `notes` say what the table cannot express.
    """

    texts: Mapping[tuple[str, str], str]
    notes: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for a reply, or up to the end of a reply that is to be continued.

        Raises KeyError for roles in an order that the template refuses.
        """
        parts, before = [], START
        for index, message in enumerate(messages):
            role = message["role"]
            if index == len(messages) - 1 and role == "assistant" and (before, LAST) in self.texts:
                role = LAST
            parts += [self.texts[before, role], message["content"]]
            before = message["role"]
        if before != "assistant":
            parts.append(self.texts[before, REPLY])
        return "".join(parts)


def turns_of(tokenizer: PreTrainedTokenizerBase) -> Turns:
    """The table of the tokenizer's chat template. Raises InexpressibleError if it has none."""
    template = tokenizer.get_chat_template(None, None)
    if "strftime_now" in template:
        raise InexpressibleError("it writes today's date")
    with rendering(tokenizer) as renderer:
        texts: dict[tuple[str, str], str] = {}
        for roles in (*NEEDED, *OPTIONAL):
            found = _gaps(renderer, roles, generate=True)
            if isinstance(found, str) and roles in NEEDED:
                raise InexpressibleError(found)
            if isinstance(found, str):
                continue
            different = [pair for pair, text in found.items() if texts.get(pair, text) != text]
            if different and roles in NEEDED:
                before, after = different[0]
                raise InexpressibleError(
                    f"the text between {before or 'the start'} and {after} depends on more than these two roles"
                )
            if not different:
                texts |= found
        last = _gaps(renderer, "ua", generate=False)
        if not isinstance(last, str) and last["user", "assistant"] != texts["user", "assistant"]:
            texts["user", LAST] = last["user", "assistant"]
        return Turns(texts, tuple(_differences(Turns(texts), renderer)))


def _gaps(renderer: Renderer, roles: str, generate: bool) -> dict[tuple[str, str], str] | str:
    """The texts between the messages of a conversation with these roles, or why there are none."""
    names = [ROLES[letter] for letter in roles]
    contents = [f"content{index}of{roles}" for index in range(len(names))]
    done = _rendered(renderer, [{"role": r, "content": c} for r, c in zip(names, contents, strict=True)], generate)
    if done is None:
        return f"it refuses a conversation of {', '.join(names)}"
    rest, found, before = done, {}, START
    for name, content in zip(names, contents, strict=True):
        gap, is_there, rest = rest.partition(content)
        if not is_there or content in rest:
            return f"it does not write each message once, in order ({', '.join(names)})"
        if found.setdefault((before, name), gap) != gap:
            return f"the text between {before} and {name} depends on more than these two roles"
        before = name
    return found | ({(before, REPLY): rest} if generate else {})


def _differences(turns: Turns, renderer: Renderer) -> Iterator[str]:
    """What the table renders differently from the template. Raises InexpressibleError for ordinary conversations."""
    for roles in ("u", "uau", "uauau", "uauauau", "su", "suau", "suauau"):
        if roles[0] == "s" and (START, "system") not in turns.texts:
            continue
        for contents in CONTENTS:
            if not _agrees(turns, renderer, roles, contents):
                raise InexpressibleError(f"it changes some messages ({', '.join(ROLES[letter] for letter in roles)})")
    if not all(_agrees(turns, renderer, roles, SPACES) for roles in ("u", "uau")):
        yield "it strips spaces and line breaks around a message, which this template keeps"
    if not _agrees(turns, renderer, "uau", THOUGHTS):
        yield "it leaves out the <think> part of earlier replies, which this template keeps"
    if (START, "system") not in turns.texts:
        yield "it has no system message: conversations with one are refused"


def _agrees(turns: Turns, renderer: Renderer, roles: str, contents: Sequence[str]) -> bool:
    messages = [
        {"role": ROLES[letter], "content": contents[index % len(contents)]} for index, letter in enumerate(roles)
    ]
    return _rendered(renderer, messages, True) == turns.render(messages)


def _rendered(renderer: Renderer, messages: Sequence[Message], generate: bool) -> str | None:
    """The template's text; None if it refuses the conversation."""
    [done] = renderer.render([RenderRequest(messages, generate=generate)])
    return None if done.error else done.text
