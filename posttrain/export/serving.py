"""`--for`: the files with which ollama, llama.cpp and vLLM serve an exported model as it was trained.

They use the template, stop tokens and sampling of training, and contain the commands of the conversion to GGUF.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ModelError
from posttrain.base.files import from_template
from posttrain.data.render import Message, Renderer, RenderRequest, rendered, rendering

FILES = {"ollama": "Modelfile", "llama.cpp": "llama.cpp.sh", "vllm": "vllm.sh"}
MOST_CONTEXT = 8192  # maximum context in tokens, for engines that reserve memory for the whole context
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # the model's own distribution


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts about an exported model that engines need."""

    name: str
    dtype: str
    tokenizer: PreTrainedTokenizerBase
    positions: int | None
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]  # stop strings of the run
    sampling: Mapping[str, float]  # the keys of PLAIN, and possibly repetition_penalty
    sampling_from: str  # its origin in words
    chat: bool  # whether training used the chat template
    system_prompt: str | None
    reward: bool

    @property
    def gguf(self) -> str:
        return f"{self.name}-{GGUF_TYPES[self.dtype]}.gguf"

    @property
    def context(self) -> int:
        return min(self.positions or MOST_CONTEXT, MOST_CONTEXT)

    @property
    def adds_begin(self) -> bool:
        """Whether the tokenizer, and thus the converted GGUF, puts its beginning-of-text token before every text."""
        begin = self.tokenizer.bos_token_id
        return begin is not None and list(self.tokenizer("a").input_ids)[:1] == [begin]


def write_for(engine: str, served: EngineFacts, folder: Path) -> None:
    """Write the engine's file to the folder of the exported model. Raises ModelError if it cannot serve the model."""
    text = {"ollama": modelfile, "llama.cpp": llama_cpp, "vllm": vllm}[engine](served)
    path = folder / FILES[engine]
    path.write_text(text, encoding="utf-8")
    if path.suffix == ".sh":
        path.chmod(0o755)


# --- a chat template as a table ---------------------------------------------------------------------------------------
#
# An engine without Jinja needs a table: for each pair of roles, the text between two messages. Most chat templates
# (ChatML, Llama 2 to 3, Zephyr, Gemma, Mistral, those of posttrain …) write each message's content unchanged, between
# texts that depend only on the roles before and after. To find the table, conversations are rendered with the template;
# it is then compared with the template on other conversations. Templates that do not fit a table are refused.

START, REPLY, LAST = "", "reply", "last"  # no message before; the opening of a reply; an unfinished reply
ROLES = {"s": "system", "u": "user", "a": "assistant"}
# The conversations that the table comes from, as first letters of roles. A template may refuse those in OPTIONAL.
NEEDED = ("u", "uau", "uauau")
OPTIONAL = ("su", "suau", "suauau", "usu", "uasu", "uausu", "au", "sau", "auau")
CONTENTS = (
    ("Hello!", "Hi, what can I do?", "And now?"),
    ("2 < 3 & {{ braces }} {% tags %} \"quotes\" 'single' \\n", "Straße 你好 🙂\ttab", "line\n\nline\n- item"),
)
SPACES = ("  two spaces before", "and after  ", "\nlines around\n")
THOUGHTS = ("Why?", "<think>\nBecause.\n</think>\n\nSo.", "And?")


class InexpressibleError(ModelError):
    """The chat template (or another value) cannot be expressed in the engine's file."""


@dataclass(frozen=True, slots=True)
class TurnTable:
    """The table: (role before, role after) -> the text between their contents.

    The role before is START at the first message. The role after is REPLY for the text that opens a reply to generate,
    and LAST for an unfinished reply at the end, if its opening differs from that of earlier replies. The template
    refuses pairs that are missing. `notes` lists what the table cannot express.
    """

    texts: Mapping[tuple[str, str], str]
    notes: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for a reply, or the conversation with its unfinished reply. KeyError: the template refuses it."""
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


def turns_of(tokenizer: PreTrainedTokenizerBase) -> TurnTable:
    """The table of the tokenizer's chat template. Raises InexpressibleError with the reason if there is no table."""
    if "strftime_now" in tokenizer.get_chat_template(None, None):
        raise InexpressibleError("it writes today's date")
    with rendering(tokenizer) as renderer:  # an error raised inside would end the reusable process: raise it afterwards
        try:
            return _proven(renderer)
        except InexpressibleError as error:
            reason = error
    raise reason


def _proven(renderer: Renderer) -> TurnTable:
    turns = TurnTable(_table(renderer))
    for roles in ("u", "uau", "uauau", "uauauau", "su", "suau", "suauau"):
        known = roles[0] == "u" or (START, "system") in turns.texts
        if known and not all(_agrees(turns, renderer, roles, contents) for contents in CONTENTS):
            changed = ", ".join(ROLES[letter] for letter in roles)
            raise InexpressibleError(f"it changes some messages ({changed})")
    return TurnTable(turns.texts, tuple(_differences(turns, renderer)))


def _table(renderer: Renderer) -> dict[tuple[str, str], str]:
    """The texts for all pairs of roles. Raises InexpressibleError if a needed conversation does not fit a table."""
    texts: dict[tuple[str, str], str] = {}
    for roles in (*NEEDED, *OPTIONAL):
        try:
            gaps = _gaps(renderer, roles, generate=True)
            if pair := next((pair for pair, text in gaps.items() if texts.get(pair, text) != text), None):
                raise _depends(*pair)
        except InexpressibleError:
            if roles in NEEDED:
                raise
            continue
        texts |= gaps
    with suppress(InexpressibleError):
        last = _gaps(renderer, "ua", generate=False)["user", "assistant"]
        if last != texts["user", "assistant"]:
            texts["user", LAST] = last
    return texts


def _depends(before: str, after: str) -> InexpressibleError:
    between = f"{before or 'the start'} and {after}"
    return InexpressibleError(f"the text between {between} depends on more than these two roles")


def _gaps(renderer: Renderer, roles: str, generate: bool) -> dict[tuple[str, str], str]:
    """The texts between messages with these roles. Raises InexpressibleError if they cannot be determined."""
    names = [ROLES[letter] for letter in roles]
    contents = [f"content{index}of{roles}" for index in range(len(names))]
    messages = [{"role": name, "content": content} for name, content in zip(names, contents, strict=True)]
    rest = _rendered(renderer, messages, generate)
    if rest is None:
        raise InexpressibleError(f"it refuses a conversation of {', '.join(names)}")
    gaps: dict[tuple[str, str], str] = {}
    before = START
    for name, content in zip(names, contents, strict=True):
        gap, separator, rest = rest.partition(content)
        if not separator or content in rest:
            raise InexpressibleError(f"it does not write each message once, in order ({', '.join(names)})")
        if gaps.setdefault((before, name), gap) != gap:
            raise _depends(before, name)
        before = name
    return gaps | ({(before, REPLY): rest} if generate else {})


def _differences(turns: TurnTable, renderer: Renderer) -> Iterator[str]:
    """Sentences about what the template does and the table cannot express."""
    if not all(_agrees(turns, renderer, roles, SPACES) for roles in ("u", "uau")):
        yield "the chat template strips spaces and line breaks around a message, but they are kept here"
    if not _agrees(turns, renderer, "uau", THOUGHTS):
        yield "the chat template omits the <think> part of earlier replies, but it is kept here"
    if (START, "system") not in turns.texts:
        yield "the chat template has no system message: conversations with one are refused"


def _agrees(turns: TurnTable, renderer: Renderer, roles: str, contents: Sequence[str]) -> bool:
    messages = [
        {"role": ROLES[letter], "content": contents[index % len(contents)]} for index, letter in enumerate(roles)
    ]
    return _rendered(renderer, messages, True) == turns.render(messages)


def _rendered(renderer: Renderer, messages: Sequence[Message], generate: bool) -> str | None:
    """The template's text; None if it refuses the conversation."""
    [result] = renderer.render([RenderRequest(messages, generate=generate)])
    return None if result.error else result.text


# --- ollama -----------------------------------------------------------------------------------------------------------


def modelfile(served: EngineFacts) -> str:
    """A Modelfile whose template writes the text of the training template. Raises InexpressibleError if none can."""
    template, notes = ollama_template(served)
    tokens = [str(served.tokenizer.convert_ids_to_tokens(id)) for id in served.stop_token_ids]
    sampling = {name: served.sampling[name] for name in PLAIN}
    sampling["repeat_penalty"] = served.sampling.get("repetition_penalty", 1.0)
    return from_template(
        __file__, "Modelfile.jinja", {"quoted": _quoted}, served=served, type=GGUF_TYPES[served.dtype], notes=notes,
        template=template, stops=dict.fromkeys([*tokens, *served.stop]), sampling=sampling,
    )  # fmt: skip


def ollama_template(served: EngineFacts) -> tuple[str, list[str]]:
    """The chat template as a Go template over ollama's `.Messages`, and its differences from the training template."""
    begin, adds = str(served.tokenizer.bos_token), served.adds_begin
    if not served.chat or served.tokenizer.chat_template is None:
        return "{{ .Prompt }}", []
    turns = turns_of(served.tokenizer)
    written = all(text.startswith(begin) for (before, _), text in turns.texts.items() if before == START)
    notes = list(turns.notes)
    if adds and not written:
        notes.append(
            f"the tokenizer puts {begin} before a text, but the training template does not: set add_bos_token to false "
            "in tokenizer_config.json before the conversion"
        )
    texts = {
        pair: text.removeprefix(begin) if adds and written and pair[0] == START else text
        for pair, text in turns.texts.items()
    }
    return go_template(TurnTable(texts)), notes


def go_template(turns: TurnTable) -> str:
    """The table as a Go template over ollama's `.Messages`. It refuses the same orders of roles."""
    cases = []
    for (before, after), text in sorted(turns.texts.items(), key=lambda item: item[0][1] != LAST):
        if after == REPLY:
            continue
        roles = f"(eq $before {_go(before)}) (eq .Role {_go('assistant' if after == LAST else after)})"
        last = "(eq (len (slice $.Messages $i)) 1) " if after == LAST else ""
        cases.append(f"if and {last}{roles} }}}}{{{{ {_go(text)} }}}}")
    replies = [
        f"if eq $before {_go(before)} }}}}{{{{ {_go(text)} }}}}"
        for (before, after), text in turns.texts.items()
        if after == REPLY and before != "assistant"
    ]
    return "\n".join(
        [
            '{{- $before := "" }}',
            "{{- range $i, $message := .Messages }}",
            "{{- " + "\n{{- else ".join(cases),
            '{{- else }}{{ template "the chat template refuses this order of roles" . }}',
            "{{- end }}",
            "{{- .Content }}",
            "{{- $before = .Role }}",
            "{{- end }}",
            "{{- " + "\n{{- else ".join(replies),
            "{{- end -}}",
        ]
    )


def _go(text: str) -> str:
    """A Go string literal."""
    escaped = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escaped.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'


def _quoted(text: str, what: str) -> str:
    """A quoted value for a Modelfile, whose syntax has no escapes. Raises InexpressibleError if quoting cannot work."""
    hidden = [character for character in text if not character.isprintable() and character != "\n"]
    if '"""' in text or text.endswith('"') or hidden:
        problem = repr(hidden[0]) if hidden else "its quotation marks"
        raise InexpressibleError(f"{what} contains {problem}, which a Modelfile cannot express")
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'


# --- llama.cpp and vLLM -----------------------------------------------------------------------------------------------


def llama_cpp(served: EngineFacts) -> str:
    """A script that converts the model with llama.cpp's converter and serves it with llama-server."""
    convert = shlex.join(["--outfile", served.gguf, "--outtype", GGUF_TYPES[served.dtype]])
    serve = ["llama-server", "--model", served.gguf, "--alias", served.name, "--ctx-size", str(served.context)]
    if served.tokenizer.chat_template is not None:
        serve += ["--jinja", "--chat-template-file", "chat_template.jinja"]
    override = [id for id in served.stop_token_ids if id != served.tokenizer.eos_token_id]
    pairs = [f"tokenizer.ggml.eot_token_id=int:{override[0]}"] if override else []
    if served.adds_begin and served.chat:
        [text] = rendered(served.tokenizer, [RenderRequest([{"role": "user", "content": "a"}])])
        if not text.startswith(str(served.tokenizer.bos_token)):  # the training template does not write it
            pairs.append("tokenizer.ggml.add_bos_token=bool:false")
    for pair in pairs:
        serve += ["--override-kv", pair]
    notes = list(_of_prompts(served))
    names = {"temperature": "--temp", "top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p"}
    for name, flag in names.items():
        serve += [flag, f"{served.sampling[name]:g}"]
    serve += ["--repeat-penalty", f"{served.sampling.get('repetition_penalty', 1.0):g}"]
    left = [*override[1:], *served.stop]
    if left:
        shown = [str(served.tokenizer.convert_ids_to_tokens(id)) if isinstance(id, int) else id for id in left]
        notes.append(f'# The server stops at two tokens at most; requests also need "stop": {json.dumps(shown)}.')
    return _script(
        [
            "# For llama.cpp, with its sources in $LLAMA_CPP and their requirements installed.",
            f'[ -f {shlex.quote(served.gguf)} ] || python "$LLAMA_CPP/convert_hf_to_gguf.py" . {convert}',
            f"# Sampling: {served.sampling_from}",
            *notes,
            _wrapped(serve),
        ]
    )


def vllm(served: EngineFacts) -> str:
    """A script that serves the model with vLLM, which reads stop tokens and sampling from generation_config.json."""
    serve = ["vllm", "serve", ".", "--served-model-name", served.name, "--dtype", served.dtype]
    if served.positions is not None:
        serve += ["--max-model-len", str(served.positions)]
    notes = []
    if served.reward:
        serve += ["--runner", "pooling"]
        notes.append('# /classify applies a sigmoid to the reward, unless the request has "use_activation": false.')
    else:
        if served.tokenizer.chat_template is not None:
            serve += ["--chat-template", "chat_template.jinja"]
        notes += _of_prompts(served)
        if served.stop:
            notes.append(f'# Requests need the stop strings of training: "stop": {json.dumps(list(served.stop))}.')
        different = {name: value for name, value in served.sampling.items() if value != PLAIN.get(name, 1.0)}
        if different and "generation_config" not in served.sampling_from:
            serve += ["--override-generation-config", json.dumps(different)]
    return _script(["# For vLLM.", *notes, _wrapped(serve)])


def _of_prompts(served: EngineFacts) -> Iterator[str]:
    """Comments on what requests must send as a prompt."""
    if not served.chat:
        yield "# Trained without a chat template: send prompts as in training to /v1/completions."
    elif served.system_prompt:
        yield f"# Trained with a system message, which requests must send: {json.dumps(served.system_prompt)}"


def _script(lines: Sequence[str]) -> str:
    return "\n".join(["#!/bin/sh -e", 'cd "$(dirname "$0")"', *lines]) + "\n"


def _wrapped(command: Sequence[str]) -> str:
    """A command with one flag per line."""
    lines = [shlex.quote(command[0])]
    for word in command[1:]:
        if word.startswith("--"):
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)
