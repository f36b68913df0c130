"""The end of completions: stop tokens, and stop strings that the newest tokens complete."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError
from posttrain.base.pieces import Pieces
from posttrain.data.prompts import end_of_turn
from posttrain.engines.protocol import Completion
from posttrain.models.families import base_of, eos_token_ids


class StopTexts:
    """The stop strings of completions; without any it needs no tokenizer."""

    def __init__(self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase | None):
        if stop and tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer, and this engine was created without one: give stop_token_ids"
            )
        self.stop, self.tokenizer = tuple(stop), tokenizer

    def __bool__(self) -> bool:
        return bool(self.stop)

    def search(self, prompt: Sequence[int]) -> StopSearch | None:
        """A search of one completion of `prompt`; None without stop strings."""
        return StopSearch(self.stop, Pieces(self.tokenizer, prompt)) if self.stop and self.tokenizer else None


class StopSearch:
    """Searches the text of a completion, without its prompt's, for stop strings."""

    def __init__(self, stop: tuple[str, ...], pieces: Pieces):
        self._stop, self._pieces = stop, pieces
        self._kept = max(map(len, stop)) - 1  # characters that may begin a stop string
        self._tail, self._seen = "", 0

    def first(self, tokens: Sequence[int]) -> int | None:
        """The number of `tokens` up to the first complete stop string; those of earlier calls are not read again."""
        for end in range(self._seen + 1, len(tokens) + 1):
            if self.add(tokens[end - 1]):
                return end
        return None

    def add(self, token: int) -> bool:
        """Whether the next token completes a stop string."""
        self._seen += 1
        text = self._tail + self._pieces.add(token) + self._pieces.own
        self._tail = text[max(0, len(text) - self._kept) :]
        text += self._pieces.rest()
        return any(stop in text for stop in self._stop)


def stop_token_ids(policy: nn.Module, tokenizer: PreTrainedTokenizerBase, turns: bool = False) -> tuple[int, ...]:
    """The stop tokens of this model: the tokenizer's end of text, and those of its generation_config.json.

    With `turns` prompts are written by the tokenizer's chat template, and its end of turn is one, too: a base model's
    tokenizer may name another token.
    """
    end = end_of_turn(tokenizer) if turns else None
    ids = [tokenizer.eos_token_id, *eos_token_ids(base_of(policy)), None if end is None else end[0]]
    return tuple(dict.fromkeys(id for id in ids if id is not None))


def text_of(
    completion: Completion,
    stop_token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int] | None = None,
) -> str:
    """A completion as a string for rewards and readers: what its tokens add to the text of `prompt`, their leading
    space included; without its stop token and without special tokens. Without a prompt, the tokens alone."""
    tokens = completion.tokens[:-1] if completion.tokens[-1] in stop_token_ids else completion.tokens
    if prompt is None:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))
    return Pieces(tokenizer, prompt).whole(tokens)
