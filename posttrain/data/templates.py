"""The template that writes conversations: the tokenizer's chat template, a built-in template, a Jinja file, or none.

The built-in templates are ordinary chat templates. The chosen template is set on the tokenizer, so that it is saved
with the model and every later use writes the same text.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.files import path_of, table_beside
from posttrain.config.schema.data import TEMPLATES, DataConfig, TagsConfig

_TEXTS = table_beside(__file__, "templates.yaml")
_R1_ZERO, _ALPACA, _ALPACA_INPUT = (_TEXTS[name] for name in ("r1_zero", "alpaca", "alpaca_input"))
DEFAULT = re.compile(r"\{% set (\w+) = \1 if \1 is defined else .* %\}\n")  # before a template: a variable's default


@dataclass(frozen=True, slots=True)
class Published:
    """A published template in Jinja, for a base model whose tokenizer has none: the text before a turn (`opening`), its
    content with the stop token (`content`), the text after it (`closing`), and the opening of the next reply (`reply`).

    It renders like the original: ChatML as described by OpenAI, Llama 3 as in meta-llama/Meta-Llama-3-8B-Instruct,
    Zephyr as in HuggingFaceH4/zephyr-7b-beta, Gemma as in google/gemma-2-9b-it. In addition, `{% generation %}` marks
    the assistant's turns with their stop tokens, so that only these tokens are trained on. `tokens` are the template's
    special tokens, with the stop token last; if it is empty, replies end with the tokenizer's stop token.
    """

    opening: str
    content: str
    closing: str
    reply: str
    tokens: Sequence[str] = ()

    @property
    def jinja(self) -> str:
        content = f"{{{{ {self.content} }}}}"
        return (
            f"{{% for message in messages %}}{self.opening}"
            f"{{% if message.role == 'assistant' %}}{{% generation %}}{content}{{% endgeneration %}}"
            f"{{% else %}}{content}{{% endif %}}{self.closing}"
            f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {self.reply} }}}}{{% endif %}}"
        )


PUBLISHED = {name: Published(**parts) for name, parts in _TEXTS["published"].items()}


@dataclass(frozen=True, slots=True)
class Template:
    """The chosen template. `turns` is False if texts are used as they are. `strip_think`: whether the thinking in
    solutions is removed; None: thinking and its tags are kept (behavior_version 1)."""

    name: str
    turns: bool
    tags: TagsConfig
    strip_think: bool | None = False

    @property
    def has_tags(self) -> bool:
        """Whether the template puts its own tags around a solution's working; then tags in the data are removed."""
        return self.name in ("tags", "r1_zero") and self.strip_think is not None

    def compose(self, working: str, answer: str) -> str:
        """The reply to a problem in the template's format, from its working and answer."""
        if self.name == "tags":
            tags = self.tags
            thought = f"{tags.reasoning_start}{working}{tags.reasoning_end}"
            return f"{thought}{tags.solution_start}{answer}{tags.solution_end}"
        if self.name == "r1_zero":
            return f"<think> {working} </think> <answer> {answer} </answer>"
        if self.name == "question_only":
            return working if "\\boxed" in working else f"{working}\n\\boxed{{{answer}}}".lstrip("\n")
        return working or answer


def choose_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Template:
    """Set the template of the settings on the tokenizer, with `chat_template_kwargs` as defaults of its variables.

    Raises DataError if the template file cannot be read, the tokenizer lacks tokens of a published template, or the
    template does not have one of the variables.
    """
    name = data.template
    template = Template(name, name != "none", data.tags, data.strip_think)
    if name.endswith(".jinja"):
        try:
            tokenizer.chat_template = path_of(name, DataError).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or NUL in the name
            raise DataError(f"the template {name} cannot be read: {error}") from error
    elif name in PUBLISHED:
        _put_on(tokenizer, name)
    elif name not in ("chat", "none"):
        tokenizer.chat_template = _builtin(name, data.tags, tokenizer)
    if data.chat_template_kwargs:
        require_chat_template(tokenizer)
        tokenizer.chat_template = _with_defaults(tokenizer.chat_template, data.chat_template_kwargs)
    return template


def _put_on(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set a published template and its stop token on the tokenizer, with which both are saved.

    Raises DataError if the vocabulary lacks a token of the template: the token would have no embedding, and a stop
    token of several pieces would not stop generation.
    """
    published = PUBLISHED[name]
    known = tokenizer.get_vocab()
    lacking = [t for t in published.tokens if t not in known or len(tokenizer.encode(t, add_special_tokens=False)) != 1]
    if lacking:
        raise DataError(
            f"data.template: {name} needs {', '.join(lacking)}, which the tokenizer lacks: use the template "
            "of the model's own family, or zephyr, which ends replies with the tokenizer's own stop token"
        )
    if not published.tokens and tokenizer.eos_token is None:
        raise DataError(
            f"data.template: {name} ends replies with the stop token, but this tokenizer has none: use a tokenizer "
            "with an eos_token, or another template"
        )
    if published.tokens and tokenizer.eos_token != published.tokens[-1]:
        tokenizer.add_special_tokens({"eos_token": published.tokens[-1]})
    tokenizer.chat_template = published.jinja


def _with_defaults(template: str | dict[str, str], values: Mapping[str, Any]) -> str | dict[str, str]:
    """The template, or each of several templates, with defaults for its variables, which replace earlier defaults. They
    are saved with the template, so every program that renders it uses them; a caller's values have priority."""
    every = template if isinstance(template, dict) else {"": template}
    bare = {key: _without_defaults(text, values) for key, text in every.items()}
    for name in values:
        if not any(re.search(rf"\b{name}\b", text) for text in bare.values()):
            raise DataError(f"data.chat_template_kwargs: the chat template has no variable {name}; remove it")
    # Jinja writes neither the line break after a tag nor spaces before a tag at the start of a line.
    lines = "".join(f"{{% set {n} = {n} if {n} is defined else {_literal(v)} %}}\n" for n, v in values.items())
    defaulted = {key: lines + text for key, text in bare.items()}
    return defaulted if isinstance(template, dict) else defaulted[""]


def _without_defaults(template: str, names: Collection[str]) -> str:
    kept = []
    while default := DEFAULT.match(template):
        kept += [] if default[1] in names else [default[0]]
        template = template[default.end() :]
    return "".join(kept) + template


def _literal(value: Any) -> str:
    """A JSON value as a Jinja literal."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def alpaca_prompt(instruction: str) -> str:
    """The prompt that the `alpaca` template writes for an instruction without input: all text before the response."""
    return f"{_ALPACA}\n\n### Instruction:\n{instruction}\n\n### Response:\n"


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise DataError(
            "data.template is chat, but the tokenizer has no chat template: set data.template to none (texts as "
            f"they are), {', '.join(name for name in TEMPLATES if name not in ('chat', 'none'))}, or a .jinja file"
        )


def _builtin(name: str, tags: TagsConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """A built-in template as Jinja, with this tokenizer's begin and end tokens."""
    preamble, user, opening, reply_opening = _parts(name, tags)
    end = "{{ eos_token }}" if tokenizer.eos_token else ""
    begins = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return (
        f"{'{{ bos_token }}' if begins else ''}"
        f"{{% if messages[0].role == 'system' %}}{{{{ messages[0].content + '\\n\\n' }}}}"
        f"{{% else %}}{preamble}{{% endif %}}"
        "{% for message in messages %}"
        f"{{% if message.role == 'user' %}}{user}"
        f"{{% elif message.role == 'assistant' %}}{opening}"
        f"{{% generation %}}{{{{ message.content }}}}{end}{{% endgeneration %}}"
        "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
        "{% elif not loop.first %}{{ raise_exception('this template has no ' + message.role + ' turns') }}{% endif %}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{opening}{reply_opening}{{% endif %}}"
    )


def _text(text: str) -> str:
    """A Jinja expression that writes the text."""
    return f"{{{{ {_literal(text)} }}}}"


def _parts(name: str, tags: TagsConfig) -> tuple[str, str, str, str]:
    """The parts of a built-in template: the preamble, a user message, a reply's opening, the next reply's opening."""
    user = "{{ message.content + '\\n' }}"
    if name == "question_only":
        return "", user, "", ""
    if name == "r1_zero":
        user = "{{ 'User: ' + message.content + '\\n' }}"
        return _text(_R1_ZERO), user, _text("Assistant: "), _text("<think>")
    if name == "tags":
        instructions = (
            "You are given a problem.\nThink about the problem and provide your working out.\n"
            f"Place it between {tags.reasoning_start} and {tags.reasoning_end}.\n"
            f"Then, provide your solution between {tags.solution_start}{tags.solution_end}\n\n"
        )
        return _text(instructions), user, "", _text(tags.reasoning_start)
    # Stanford Alpaca has two prompts; a message from an Alpaca row also has `instruction` and `input`
    with_input, without = _text(_ALPACA_INPUT), _text(_ALPACA)
    preamble = f"{{% if messages[0].input %}}{with_input}{{% else %}}{without}{{% endif %}}{{{{ '\\n\\n' }}}}"
    user = (
        "{% if message.input %}{{ '### Instruction:\\n' + message.instruction }}"
        "{{ '\\n\\n### Input:\\n' + message.input + '\\n\\n' }}"
        "{% else %}{{ '### Instruction:\\n' + message.content + '\\n\\n' }}{% endif %}"
    )
    return preamble, user, _text("### Response:\n"), ""
