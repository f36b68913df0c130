"""Published chat templates by name, for a base model whose tokenizer has none.

They render as the originals: ChatML as OpenAI describes it, Llama 3 of meta-llama/Meta-Llama-3-8B-Instruct,
Zephyr of HuggingFaceH4/zephyr-7b-beta, Gemma of google/gemma-2-9b-it. In addition, `{% generation %}` marks the
assistant's turns with their stop tokens, so that only these tokens are trained.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError


@dataclass(frozen=True, slots=True)
class Published:
    """A template in Jinja: the text before a turn (`opening`), its content with the stop token (`said`), the text after
    it (`closing`), and the opening of the next reply.

    `tokens` are its special tokens, the last one the stop token; none: it ends replies with the tokenizer's own.
    """

    opening: str
    said: str
    closing: str
    reply: str
    tokens: tuple[str, ...] = ()

    @property
    def jinja(self) -> str:
        said = "{{ " + self.said + " }}"
        return (
            "{% for message in messages %}"
            + self.opening
            + "{% if message.role == 'assistant' %}{% generation %}"
            + said
            + "{% endgeneration %}{% else %}"
            + said
            + "{% endif %}"
            + self.closing
            + "{% endfor %}{% if add_generation_prompt %}{{ "
            + self.reply
            + " }}{% endif %}"
        )


BOS = "{% if loop.first %}{{ bos_token }}{% endif %}"
NO_OTHER_ROLES = (
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('zephyr has no ' + message.role + ' turns') }}{% endif %}"
)
IN_TURN = (
    "{% if message.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('gemma has only turns of user and assistant, in alternation') }}{% endif %}"
)
PUBLISHED = {
    "chatml": Published(
        r"{{ '<|im_start|>' + message.role + '\n' }}",
        "message.content + '<|im_end|>'",
        r"{{ '\n' }}",
        r"'<|im_start|>assistant\n'",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": Published(
        BOS + r"{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}",
        "message.content | trim + '<|eot_id|>'",
        "",
        r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "zephyr": Published(
        NO_OTHER_ROLES + r"{{ '<|' + message.role + '|>\n' }}",
        "message.content + eos_token",
        r"{{ '\n' }}",
        r"'<|assistant|>\n'",
    ),
    "gemma": Published(
        BOS + IN_TURN + r"{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}",
        "message.content | trim + '<end_of_turn>'",
        r"{{ '\n' }}",
        r"'<start_of_turn>model\n'",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
}


def put_on(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set a published template and its stop token on the tokenizer; both are saved with it.

    Raises DataError if the vocabulary lacks a token of the template: it would have no embedding, and a stop token of
    several pieces would not stop generation.
    """
    published = PUBLISHED[name]
    lacking = [token for token in published.tokens if not _is_token(tokenizer, token)]
    if lacking:
        raise DataError(
            f"data.template: {name} needs {', '.join(lacking)}, which the tokenizer lacks: use the template "
            "of the model's own family, or zephyr, which ends replies with the tokenizer's own stop token"
        )
    if not published.tokens and tokenizer.eos_token is None:
        raise DataError(
            f"data.template: {name} ends replies with the tokenizer's stop token, and it has none: use a tokenizer "
            "with an eos_token, or another template"
        )
    if published.tokens and tokenizer.eos_token != published.tokens[-1]:
        tokenizer.add_special_tokens({"eos_token": published.tokens[-1]})
    tokenizer.chat_template = published.jinja


def _is_token(tokenizer: PreTrainedTokenizerBase, token: str) -> bool:
    return token in tokenizer.get_vocab() and len(tokenizer.encode(token, add_special_tokens=False)) == 1
