"""A tokenizer made on the spot: one token per byte, and ChatML's three special tokens; data prepared with it."""

from dataclasses import fields

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain import data
from posttrain.data import KINDS, Options, layouts

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = None, stop: bool = True) -> PreTrainedTokenizerFast:
    """Bytes as tokens; `stop` False leaves out the stop token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>" if stop else None)
    tokenizer.chat_template = chat_template
    return tokenizer


def base_tokenizer(tokens):
    """Of a base model: a beginning and an end of text, perhaps the tokens of a template, and no template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": tokens})
    return tokenizer


def trained_text(prepared, tokenizer, index=0):
    """The trained tokens of an example as text, runs of them apart."""
    (tree,) = prepared.train[index].trees
    runs, before = [], False
    for token, trained in zip(tree.tokens, tree.trained, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(int(token))
        before = trained
    return [tokenizer.decode(run) for run in runs]


def prepare(settings, tokenizer, kind, **options):
    """`posttrain.data.prepare`, with the settings of the kind and the options by name."""
    own = {field.name: options.pop(field.name) for field in fields(KINDS[kind]) if field.name in options}
    return data.prepare(settings, tokenizer, KINDS[kind](**own), Options(**options))


def find_layout(format, columns, sample, kind, where):
    """The layout of rows like those of `sample`, for a kind by its name."""
    return layouts.find_layout(format, columns, sample, KINDS[kind](), where)
