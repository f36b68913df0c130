"""The text of tokens as a continuation of those before them, whole or piece by piece as from a streaming decoder."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

LOST = "\ufffd"  # how decoders write bytes that are not, or not yet, a character
CHARACTER = 4  # maximum tokens of one character: UTF-8 has up to four bytes
CONTEXT = 8  # tokens before a text that are decoded with it; more where these have no text


class Decoder(Protocol):
    """A tokenizer of transformers, or what decodes like one."""

    def decode(
        self, token_ids: Any, /, *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool
    ) -> Any: ...


class Pieces:
    """The pieces of a text that continues the text of `before`, token by token; concatenated, they are the text.

    A piece is one token, or the tokens of one character's bytes. Each is decoded together with the tokens before it,
    because decoders treat the first token differently: many strip its leading space. Special tokens have no text, as
    with `skip_special_tokens`; `own` has it after `add`. With `special` they are decoded like others.
    """

    def __init__(self, tokenizer: Decoder, before: Sequence[int] = (), special: bool = False):
        self._tokenizer, self._special = tokenizer, special
        size = CONTEXT
        self._ids = [int(token) for token in before[-size:]]
        while size < len(before) and (not (text := self._decoded(self._ids)) or text.startswith(LOST)):
            size *= 4
            self._ids = [int(token) for token in before[-size:]]
        self._begin = len(self._ids)  # of the tokens without a piece, after those that are decoded with them
        self._start = self._whole = self._decoded(self._ids)
        self._owed = ""  # if `before` ends within a character: its part of the first piece's text
        for cut in range(1, CHARACTER) if self._start.endswith(LOST) else ():
            start = self._decoded(self._ids[:-cut])
            if not start.endswith(LOST):
                self._owed, self._start, self._begin = self._whole[len(start) :], start, self._begin - cut
                break
        self.open = 0  # tokens that have no piece yet
        self.own = ""  # the last token's own text, if it is special

    def add(self, token: int) -> str:
        """The next piece; empty if the token ends within a character."""
        text = self._decoded([*self._ids, token])
        self.own = self._special_text(token, text)
        if self.own:
            piece = self.rest()
            self._close(bool(piece))
            return piece
        self._ids.append(token)
        self._whole = text
        self.open += 1
        if text.endswith(LOST):
            return "" if self.open < CHARACTER else self._settled()
        piece = self.rest()
        self._close(bool(piece))
        return piece

    def rest(self) -> str:
        """The text of the tokens that have no piece yet."""
        return self._after(self._whole, self._ids[self._begin :]) if self.open else ""

    def likely(self, token: int) -> str:
        """The text of a token if it were the next one."""
        text = self._decoded([*self._ids, token])
        after = self._after(text, [*self._ids[self._begin :], token]).removeprefix(self.rest())
        return self._special_text(token, text) or after

    def whole(self, ids: Sequence[int]) -> str:
        """The text of all `ids` at once: all pieces, and the rest of an incomplete character."""
        text = self._decoded([*self._ids, *ids])
        if not self._owed and text.startswith(self._start) and LOST not in text[len(self._start) :]:
            return text[len(self._start) :]
        return "".join(map(self.add, ids)) + self.rest()

    def _after(self, text: str, new: Sequence[int]) -> str:
        """The text that `new` tokens add to the text before them."""
        if text.startswith(self._start):
            return text[len(self._start) :].removeprefix(self._owed)
        return self._decoded(new)  # some decoders write a row of bytes as lost if one of them is

    def _special_text(self, token: int, text: str) -> str:
        """A special token's own text, empty for other tokens; `text` is the whole text with the token."""
        if self._special or text != self._whole or self._decoded([token]):
            return ""
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _settled(self) -> str:
        """The text of open tokens that no later token completes; the last ones may begin a character."""
        rest = self.rest()
        for cut in range(self._begin + 1, len(self._ids)):
            piece = self._after(self._decoded(self._ids[:cut]), self._ids[self._begin : cut])
            if piece + self._decoded(self._ids[cut:]) == rest:
                break
        else:
            piece, cut = rest, len(self._ids)
        del self._ids[: self._begin]
        self._begin, self._owed = cut - self._begin, ""
        self._start, self.open = self._decoded(self._ids[: self._begin]), min(self.open, len(self._ids) - self._begin)
        self._whole = self._decoded(self._ids)
        return piece

    def _close(self, seen: bool) -> None:
        """Close the open tokens, which have a piece now. If it is visible (`seen`), later tokens follow it."""
        if seen:
            del self._ids[: self._begin]
        elif self._start or len(self._ids) > CONTEXT:
            del self._ids[self._begin :]
        self._begin, self._owed, self.open = len(self._ids), "", 0
        self._start = self._whole = self._decoded(self._ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False)
        )


def pieces(ids: Sequence[int], tokenizer: Decoder, before: Sequence[int] = ()) -> Iterator[tuple[int, str]]:
    """The text of `ids` in pieces, each with its number of tokens; concatenated, they continue the text of `before`.

    Special tokens are written, too.
    """
    reader, count = Pieces(tokenizer, before, special=True), 0
    for token in ids:
        count += 1
        text = reader.add(int(token))
        if count > reader.open:
            yield count - reader.open, text
            count = reader.open
    if count:
        yield count, reader.rest()
