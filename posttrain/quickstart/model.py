"""An untrained language model: a small Qwen3 with random weights, and a tokenizer made for the task."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.config import DataConfig
from posttrain.data import arithmetic_problems
from posttrain.data.render import RenderRequest, rendered
from posttrain.data.templates import choose_template
from posttrain.quickstart.show import turns

PAD, STOP = "<pad>", "<stop>"
EXAMPLES = 1000  # strings that the tokenizer is trained on
VOCABULARY = 512  # maximum: all 256 bytes, so that any string can be encoded, and phrases of the task


def make_model(folder: Path, seed: int) -> int:
    """Write an ordinary model folder, as transformers reads it, and return how many weights the model has.

    The tokenizer has the chat template `tags`: a reply is its working between two tags, then its solution between two.
    """
    tokenizer = make_tokenizer(seed)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=3,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # for short sequences
            initializer_range=0.05,  # larger than usual: so small a model learns faster
            tie_word_embeddings=True,
            pad_token_id=tokenizer.get_vocab()[PAD],
            eos_token_id=tokenizer.get_vocab()[STOP],
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def make_tokenizer(seed: int) -> PreTrainedTokenizerBase:
    """Byte-level BPE trained on the task. Digits stand alone, so that 47 is a 4 and a 7; each tag is one token."""
    data = DataConfig(source="builtin:arithmetic", template="tags")
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token=STOP)
    template = choose_template(data, blank)
    rows = arithmetic_problems("train", EXAMPLES, seed)
    replies = [(row["problem"], template.compose(row["solution"], row["answer"])) for row in rows]
    texts = rendered(blank, [RenderRequest(turns(*reply)) for reply in replies])
    tags = list(data.tags.model_dump().values())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]"), "isolated"),
            *(pre_tokenizers.Split(mark, "removed") for mark in (STOP, *tags)),  # no phrase crosses a tag
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),  # whole phrases may become tokens
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=STOP, chat_template=blank.chat_template
    )
