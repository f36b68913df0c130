"""The end of completions: stop tokens, and stop strings that the newest tokens complete."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.data.tokencheck import end_of_turn
from posttrain.engines.protocol import Completion
from posttrain.errors import ConfigError
from posttrain.models.families import base_of
from posttrain.models.load import eos_token_ids


class StopTexts:
    """Searches completions for `stop`; without stop strings it needs no tokenizer."""

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase | None):
        if stop and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer, and this engine was created without one: give stop_token_ids"
            )
        self.stop, self.tokenizer = tuple(stop), tokenizer
        # A token has at least one byte of text, except special tokens and parts of a character: some more are read.
        self.tail = max((len(text.encode()) for text in stop), default=0) + 8

    def __bool__(self) -> bool:
        return bool(self.stop)

    def first(self, tokens: Sequence[int], seen: int) -> int | None:
        """The number of `tokens` up to the first complete stop string; the first `seen` tokens have none."""
        if self.tokenizer is None:
            return None
        for end in range(seen + 1, len(tokens) + 1):
            text = self.tokenizer.decode(list(tokens[max(0, end - self.tail) : end]))
            if any(stop in text for stop in self.stop):
                return end
        return None


def stop_token_ids(policy: nn.Module, tokenizer: PreTrainedTokenizerBase, turns: bool = False) -> tuple[int, ...]:
    """The stop tokens of this model: the tokenizer's end of text, and those of its generation_config.json.

    With `turns` prompts are written by the tokenizer's chat template, and its end of turn is one, too: a base model's
    tokenizer may name another token.
    """
    end = end_of_turn(tokenizer) if turns else None
    ids = [tokenizer.eos_token_id, *eos_token_ids(base_of(policy)), None if end is None else end[0]]
    return tuple(dict.fromkeys(id for id in ids if id is not None))


def text_of(completion: Completion, stop_token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """A completion as a string for rewards and readers: without its stop token and without special tokens."""
    tokens = completion.tokens[:-1] if completion.tokens[-1] in stop_token_ids else completion.tokens
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
