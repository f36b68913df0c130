"""A chat template as a table: the text between two messages by their roles. Engines without Jinja are given this form.

Most chat templates (ChatML, Llama 2 to 3, Zephyr, Gemma, Mistral, those of posttrain …) write each message's content
as it is, between texts that depend only on the roles before and after. The table is found by rendering conversations
with the template itself and is compared with it on others; a template of another kind is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ModelError
from posttrain.data.render import Message, Renderer, RenderRequest, rendering

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
    if "strftime_now" in tokenizer.get_chat_template(None, None):
        raise InexpressibleError("it writes today's date")
    with rendering(tokenizer) as renderer:
        found = _table(renderer)
        wrong = found if isinstance(found, str) else _wrong(Turns(found), renderer)
        notes = [] if isinstance(found, str) or wrong else list(_differences(Turns(found), renderer))
    if isinstance(found, str) or wrong:
        raise InexpressibleError(wrong)
    return Turns(found, tuple(notes))


def _table(renderer: Renderer) -> dict[tuple[str, str], str] | str:
    """The texts of all pairs of roles, or why there is no table."""
    texts: dict[tuple[str, str], str] = {}
    for roles in (*NEEDED, *OPTIONAL):
        found = _gaps(renderer, roles, generate=True)
        if not isinstance(found, str):
            pair = next((pair for pair, text in found.items() if texts.get(pair, text) != text), None)
            found = found if pair is None else _depends(*pair)
        if isinstance(found, str) and roles in NEEDED:
            return found
        texts |= {} if isinstance(found, str) else found
    last = _gaps(renderer, "ua", generate=False)
    if not isinstance(last, str) and last["user", "assistant"] != texts["user", "assistant"]:
        texts["user", LAST] = last["user", "assistant"]
    return texts


def _depends(before: str, after: str) -> str:
    return f"the text between {before or 'the start'} and {after} depends on more than these two roles"


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
            return _depends(before, name)
        before = name
    return found | ({(before, REPLY): rest} if generate else {})


def _wrong(turns: Turns, renderer: Renderer) -> str | None:
    """An ordinary conversation that the table renders differently from the template; None if there is none."""
    for roles in ("u", "uau", "uauau", "uauauau", "su", "suau", "suauau"):
        known = roles[0] == "u" or (START, "system") in turns.texts
        if known and not all(_agrees(turns, renderer, roles, contents) for contents in CONTENTS):
            return f"it changes some messages ({', '.join(ROLES[letter] for letter in roles)})"
    return None


def _differences(turns: Turns, renderer: Renderer) -> Iterator[str]:
    """What the table cannot express, as sentences about the template."""
    if not all(_agrees(turns, renderer, roles, SPACES) for roles in ("u", "uau")):
        yield "the chat template strips spaces and line breaks around a message, which are kept here"
    if not _agrees(turns, renderer, "uau", THOUGHTS):
        yield "the chat template leaves out the <think> part of earlier replies, which is kept here"
    if (START, "system") not in turns.texts:
        yield "the chat template has no system message: conversations with one are refused"


def _agrees(turns: Turns, renderer: Renderer, roles: str, contents: Sequence[str]) -> bool:
    messages = [
        {"role": ROLES[letter], "content": contents[index % len(contents)]} for index, letter in enumerate(roles)
    ]
    return _rendered(renderer, messages, True) == turns.render(messages)


def _rendered(renderer: Renderer, messages: Sequence[Message], generate: bool) -> str | None:
    """The template's text; None if it refuses the conversation."""
    [done] = renderer.render([RenderRequest(messages, generate=generate)])
    return None if done.error else done.text
