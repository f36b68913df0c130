"""How a conversation is written: the tokenizer's chat template, one of the built-in ones, a Jinja file, or not at all.

The built-in ones are ordinary chat templates. Whichever is used is put on the tokenizer, so that it is saved with the
model and every later use writes the same text.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.paths import path_of
from posttrain.config.schema.data import TEMPLATES, DataConfig, TagsConfig
from posttrain.data.published import PUBLISHED, put_on

R1_ZERO_PREAMBLE = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
)
DEFAULT = re.compile(r"\{% set (\w+) = \1 if \1 is defined else .* %\}\n")  # a variable's, before the template
ALPACA_PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
ALPACA_PREAMBLE_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


@dataclass(frozen=True, slots=True)
class Template:
    """The chosen template. `turns` is False when texts are used as they are.

    `strip_think` is whether the thinking of solutions goes; None: it and its tags stay (behavior_version 1).
    """

    name: str
    turns: bool
    tags: TagsConfig
    strip_think: bool | None = False

    @property
    def has_tags(self) -> bool:
        """Whether it writes a solution's working between tags of its own, in which others have no place."""
        return self.name in ("tags", "r1_zero") and self.strip_think is not None

    def compose(self, working: str, answer: str) -> str:
        """The reply to a problem in the template's own form, from its working and its answer."""
        if self.name == "tags":
            tags = self.tags
            return (
                f"{tags.reasoning_start}{working}{tags.reasoning_end}{tags.solution_start}{answer}{tags.solution_end}"
            )
        if self.name == "r1_zero":
            return f"<think> {working} </think> <answer> {answer} </answer>"
        if self.name == "question_only":
            return working if "\\boxed" in working else f"{working}\n\\boxed{{{answer}}}".lstrip("\n")
        return working or answer


def choose_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The template of the settings, put on the tokenizer, with `chat_template_kwargs` as defaults of its variables.

    Raises DataError when the file cannot be read, the tokenizer lacks the tokens of a published template, or the
    template has no such variable.
    """
    name = data.template
    template = Template(name, name != "none", data.tags, data.strip_think)
    if name.endswith(".jinja"):
        try:
            tokenizer.chat_template = path_of(name, DataError).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or NUL in the name
            raise DataError(f"the template {name} cannot be read: {error}") from error
    elif name in PUBLISHED:
        put_on(tokenizer, name)
    elif name not in ("chat", "none"):
        tokenizer.chat_template = _builtin(name, data.tags, tokenizer)
    if data.chat_template_kwargs:
        require_chat_template(tokenizer)
        tokenizer.chat_template = _with_defaults(tokenizer.chat_template, data.chat_template_kwargs)
    return template


def date_of(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The date that the chat template writes: that of the settings, or today; None if it asks for none."""
    if data.template == "none" or "strftime_now" not in str(tokenizer.chat_template):
        return None
    return data.date or date.today().isoformat()


def _with_defaults(template: str | dict[str, str], values: Mapping[str, Any]) -> str | dict[str, str]:
    """The template with defaults of its variables, saved with it: every program that renders it takes them, and what
    a caller gives has priority. Of several templates, each. Replaces earlier defaults of the same names."""
    every = template if isinstance(template, dict) else {"": template}
    bare = {key: _without_defaults(text, values) for key, text in every.items()}
    for name in values:
        if not any(re.search(rf"\b{name}\b", text) for text in bare.values()):
            raise DataError(f"data.chat_template_kwargs: the chat template has no variable {name}; remove it")
    # A line break after a tag is not written, and spaces before a tag at the start of a line neither.
    lines = "".join(f"{{% set {n} = {n} if {n} is defined else {_literal(v)} %}}\n" for n, v in values.items())
    found = {key: lines + text for key, text in bare.items()}
    return found if isinstance(template, dict) else found[""]


def _without_defaults(template: str, names: Collection[str]) -> str:
    kept = []
    while default := DEFAULT.match(template):
        kept += [] if default[1] in names else [default[0]]
        template = template[default.end() :]
    return "".join(kept) + template


def _literal(value: Any) -> str:
    """A value of JSON as Jinja writes it."""
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
    """An instruction without input, as the `alpaca` template writes it: everything before the response."""
    return f"{ALPACA_PREAMBLE}\n\n### Instruction:\n{instruction}\n\n### Response:\n"


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError when there is no chat template to write conversations with."""
    if tokenizer.chat_template is None:
        raise DataError(
            "data.template is chat, but the tokenizer has no chat template: set data.template to none (texts as "
            f"they are), {', '.join(name for name in TEMPLATES if name not in ('chat', 'none'))}, or a .jinja file"
        )


def _builtin(name: str, tags: TagsConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """A built-in template as Jinja, with the beginning and end of text as this tokenizer has them."""
    parts = {"tags": _tags, "r1_zero": _r1_zero, "question_only": _question_only, "alpaca": _alpaca}[name](tags)
    preamble, user, opening, reply_opening = parts
    end = "{{ eos_token }}" if tokenizer.eos_token else ""
    return (
        f"{'{{ bos_token }}' if _begins_with_bos(tokenizer) else ''}"
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
    """A literal for Jinja."""
    return f"{{{{ {_literal(text)} }}}}"


def _tags(tags: TagsConfig) -> tuple[str, str, str, str]:
    instructions = (
        "You are given a problem.\nThink about the problem and provide your working out.\n"
        f"Place it between {tags.reasoning_start} and {tags.reasoning_end}.\n"
        f"Then, provide your solution between {tags.solution_start}{tags.solution_end}\n\n"
    )
    return _text(instructions), "{{ message.content + '\\n' }}", "", _text(tags.reasoning_start)


def _r1_zero(tags: TagsConfig) -> tuple[str, str, str, str]:
    return _text(R1_ZERO_PREAMBLE), "{{ 'User: ' + message.content + '\\n' }}", _text("Assistant: "), _text("<think>")


def _question_only(tags: TagsConfig) -> tuple[str, str, str, str]:
    return "", "{{ message.content + '\\n' }}", "", ""


def _alpaca(tags: TagsConfig) -> tuple[str, str, str, str]:
    """Stanford Alpaca's two prompts. A message that came from an Alpaca row has its instruction and input apart."""
    preamble = (
        f"{{% if messages[0].input %}}{_text(ALPACA_PREAMBLE_INPUT)}{{% else %}}{_text(ALPACA_PREAMBLE)}{{% endif %}}"
        "{{ '\\n\\n' }}"
    )
    user = (
        "{% if message.input %}{{ '### Instruction:\\n' + message.instruction }}"
        "{{ '\\n\\n### Input:\\n' + message.input + '\\n\\n' }}"
        "{% else %}{{ '### Instruction:\\n' + message.content + '\\n\\n' }}{% endif %}"
    )
    return preamble, user, _text("### Response:\n"), ""


def _begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its beginning-of-text token before a plain text."""
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
