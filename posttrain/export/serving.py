"""`--for`: the files with which ollama, llama.cpp and vLLM serve an exported model as it was trained.

Template, stop tokens and sampling are those of training. Conversion to GGUF is llama.cpp's; the commands are written.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ModelError
from posttrain.data.render import RenderRequest, rendered
from posttrain.export.turns import LAST, REPLY, START, InexpressibleError, Turns, turns_of

ENGINES = ("ollama", "llama.cpp", "vllm")
FILES = {"ollama": "Modelfile", "llama.cpp": "llama.cpp.sh", "vllm": "vllm.sh"}
MOST_CONTEXT = 8192  # tokens, for engines that reserve memory for all of them
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # the model's own distribution


@dataclass(frozen=True, slots=True)
class Served:
    """What engines need to know of an exported model."""

    name: str
    dtype: str
    tokenizer: PreTrainedTokenizerBase
    positions: int | None
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]  # stop strings of the run
    sampling: Mapping[str, float]  # as in PLAIN, and repetition_penalty
    sampling_from: str  # where it comes from, in words
    chat: bool  # whether training used the chat template
    system_prompt: str | None
    reward: bool

    @property
    def gguf(self) -> str:
        return f"{self.name}-{GGUF_TYPES[self.dtype]}.gguf"

    @property
    def stop_texts(self) -> list[str]:
        """The strings of the stop tokens, then the run's stop strings."""
        tokens = [str(self.tokenizer.convert_ids_to_tokens(id)) for id in self.stop_token_ids]
        return list(dict.fromkeys([*tokens, *self.stop]))

    @property
    def context(self) -> int:
        return min(self.positions or MOST_CONTEXT, MOST_CONTEXT)

    @property
    def adds_begin(self) -> bool:
        """Whether the tokenizer puts its beginning-of-text token before a text, as a GGUF of it then does."""
        begin = self.tokenizer.bos_token_id
        return begin is not None and list(self.tokenizer("a").input_ids)[:1] == [begin]


def refuse_engines(engines: Sequence[str], reward: bool) -> None:
    """Raise ModelError for engines that cannot serve this kind of model, before any work."""
    if reward and (others := [name for name in engines if name != "vllm"]):
        raise ModelError(f"--for {others[0]}: it serves models that generate, and this is a reward model: use vllm")


def write_for(engine: str, served: Served, folder: Path) -> None:
    """Write the engine's file to the folder of the exported model. Raises ModelError if that cannot be done."""
    text = {"ollama": modelfile, "llama.cpp": llama_cpp, "vllm": vllm}[engine](served)
    path = folder / FILES[engine]
    path.write_text(text, encoding="utf-8")
    if path.suffix == ".sh":
        path.chmod(0o755)


# --- ollama -----------------------------------------------------------------------------------------------------------


def modelfile(served: Served) -> str:
    """A Modelfile whose template writes what training's wrote.

    Raises InexpressibleError for a chat template, system prompt or stop string that it cannot express.
    """
    template, notes = ollama_template(served)
    lines = [
        "# For ollama. Here, with llama.cpp's sources and their requirements in $LLAMA_CPP:",
        f"#   python $LLAMA_CPP/convert_hf_to_gguf.py . --outfile {served.gguf} --outtype {GGUF_TYPES[served.dtype]}",
        f"#   ollama create {served.name} -f Modelfile && ollama run {served.name}",
        *(f"# Differs from training: {note}." for note in notes),
        f"FROM ./{served.gguf}",
        f"TEMPLATE {_quoted(template, 'the chat template')}",
    ]
    if served.system_prompt and served.chat:
        lines.append(f"SYSTEM {_quoted(served.system_prompt, 'the system prompt')}")
    lines += [f"PARAMETER stop {_quoted(text, 'a stop string')}" for text in served.stop_texts]
    sampling = {name: served.sampling[name] for name in PLAIN}
    sampling["repeat_penalty"] = served.sampling.get("repetition_penalty", 1.0)
    lines += [
        f"# {served.positions:,} positions; each token of the context takes memory." if served.positions else "",
        f"PARAMETER num_ctx {served.context}",
        f"# {served.sampling_from}",
        *(f"PARAMETER {name} {value:g}" for name, value in sampling.items()),
    ]
    return "\n".join(line for line in lines if line) + "\n"


def ollama_template(served: Served) -> tuple[str, list[str]]:
    """The chat template in ollama's form, a Go template over `.Messages`; and what differs from training's."""
    begin, adds = str(served.tokenizer.bos_token), served.adds_begin
    if not served.chat or served.tokenizer.chat_template is None:
        return "{{ .Prompt }}", []
    turns = turns_of(served.tokenizer)
    starts = [text for (before, _), text in turns.texts.items() if before == START]
    written = all(text.startswith(begin) for text in starts)
    notes = list(turns.notes)
    if adds and not written:
        notes.append(
            f"the tokenizer puts {begin} before a text, training's template does not: set add_bos_token to false in "
            "tokenizer_config.json before the conversion"
        )
    texts = {
        pair: text.removeprefix(begin) if adds and written and pair[0] == START else text
        for pair, text in turns.texts.items()
    }
    return go_template(Turns(texts)), notes


def go_template(turns: Turns) -> str:
    """A table of turns as a Go template over ollama's `.Messages`; a refused order of roles is an error there too."""
    cases = []
    for (before, after), text in sorted(turns.texts.items(), key=lambda item: item[0][1] != LAST):
        if after == REPLY:
            continue
        place = f"(eq $before {_go(before)}) (eq .Role {_go('assistant' if after == LAST else after)})"
        last = "(eq (len (slice $.Messages $i)) 1) " if after == LAST else ""
        cases.append(f"if and {last}{place} }}}}{{{{ {_go(text)} }}}}")
    replies = [
        f"if eq $before {_go(before)} }}}}{{{{ {_go(text)} }}}}"
        for (before, after), text in turns.texts.items()
        if after == REPLY and before != "assistant"
    ]
    return "\n".join(
        [
            '{{- $before := "" }}',
            "{{- range $i, $message := .Messages }}",
            "\n".join("{{- " + ("" if index == 0 else "else ") + case for index, case in enumerate(cases)),
            '{{- else }}{{ template "the chat template refuses this order of roles" . }}',
            "{{- end }}",
            "{{- .Content }}",
            "{{- $before = .Role }}",
            "{{- end }}",
            "\n".join("{{- " + ("" if index == 0 else "else ") + reply for index, reply in enumerate(replies)),
            "{{- end -}}",
        ]
    )


def _go(text: str) -> str:
    """A string literal of Go."""
    escaped = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escaped.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'


def _quoted(text: str, what: str) -> str:
    """A value of a Modelfile, which has no escapes."""
    hidden = [character for character in text if not character.isprintable() and character != "\n"]
    if '"""' in text or text.endswith('"') or hidden:
        sign = repr(hidden[0]) if hidden else "its quotation marks"
        raise InexpressibleError(f"{what} has {sign}, which a Modelfile cannot hold")
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'


# --- llama.cpp and vLLM -----------------------------------------------------------------------------------------------


def llama_cpp(served: Served) -> str:
    """A script that converts the model with llama.cpp's converter and serves it with llama-server."""
    convert = shlex.join(["--outfile", served.gguf, "--outtype", GGUF_TYPES[served.dtype]])
    serve = ["llama-server", "--model", served.gguf, "--alias", served.name, "--ctx-size", str(served.context)]
    notes = []
    if served.tokenizer.chat_template is not None:
        serve += ["--jinja", "--chat-template-file", "chat_template.jinja"]
    override = [id for id in served.stop_token_ids if id != served.tokenizer.eos_token_id]
    pairs = [f"tokenizer.ggml.eot_token_id=int:{override[0]}"] if override else []
    if served.adds_begin and served.chat and not _starts_with_begin(served):
        pairs.append("tokenizer.ggml.add_bos_token=bool:false")
    for pair in pairs:
        serve += ["--override-kv", pair]
    notes += _of_prompts(served)
    names = {"temperature": "--temp", "top_p": "--top-p", "top_k": "--top-k", "min_p": "--min-p"}
    for name, flag in names.items():
        serve += [flag, f"{served.sampling[name]:g}"]
    serve += ["--repeat-penalty", f"{served.sampling.get('repetition_penalty', 1.0):g}"]
    left = [*override[1:], *served.stop]
    if left:
        shown = [str(served.tokenizer.convert_ids_to_tokens(one)) if isinstance(one, int) else one for one in left]
        notes.append(f'# It stops at the end of text and one more token; requests need "stop": {json.dumps(shown)}.')
    return _script(
        [
            "# For llama.cpp, with its sources and their requirements in $LLAMA_CPP.",
            f'[ -f {shlex.quote(served.gguf)} ] || python "$LLAMA_CPP/convert_hf_to_gguf.py" . {convert}',
            f"# Sampling: {served.sampling_from}",
            *notes,
            _wrapped(serve),
        ]
    )


def vllm(served: Served) -> str:
    """A script that serves the model with vLLM; it reads stop tokens and sampling from generation_config.json."""
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


def _of_prompts(served: Served) -> Iterator[str]:
    """What requests have to know of training's prompts."""
    if not served.chat:
        yield "# Trained without a chat template: ask /v1/completions with prompts as in training."
    elif served.system_prompt:
        yield f"# Trained with a system message, which requests need: {json.dumps(served.system_prompt)}"


def _starts_with_begin(served: Served) -> bool:
    """Whether training's template writes the beginning-of-text token itself."""
    [text] = rendered(served.tokenizer, [RenderRequest([{"role": "user", "content": "a"}])])
    return text.startswith(str(served.tokenizer.bos_token))


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
