"""The text of each token, as from a streaming decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

LOST = "\ufffd"  # how decoders write bytes that are not, or not yet, a character
CHARACTER = 4  # maximum tokens of one character: UTF-8 has up to four bytes


class Decoder(Protocol):
    """A tokenizer of transformers, or what decodes like one."""

    def decode(self, token_ids: Any, /, *, clean_up_tokenization_spaces: bool) -> Any: ...


def pieces(ids: Sequence[int], tokenizer: Decoder, before: Sequence[int] = ()) -> Iterator[tuple[int, str]]:
    """The text of `ids` in pieces, each with its number of tokens; concatenated, they continue the text of `before`.

    A piece is one token, or the tokens of one character's bytes. Each is decoded together with the previous piece,
    because decoders treat the first token differently: many strip its leading space.
    """
    tokens = [*before, *ids]

    def decoded(some: Sequence[int]) -> str:
        return str(tokenizer.decode(list(some), clean_up_tokenization_spaces=False))

    context, begin = 0, len(before)
    for end in range(begin + 1, len(tokens) + 1):
        text = decoded(tokens[context:end])
        if text.endswith(LOST) and end < len(tokens) and end - begin < CHARACTER:
            continue
        yield end - begin, text[len(decoded(tokens[context:begin])) :]
        context, begin = begin, end
