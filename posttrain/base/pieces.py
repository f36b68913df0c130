"""The text of tokens as a continuation of earlier tokens: whole, or piece by piece as from a streaming decoder."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

LOST = "\ufffd"  # decoders write this for bytes that are not a character, or not a complete one yet
CHARACTER = 4  # maximum tokens of one character: UTF-8 has up to four bytes
CONTEXT = 8  # earlier tokens that are decoded together with a text; more if these have no text


class Decoder(Protocol):
    """A transformers tokenizer, or an object with the same `decode`."""

    def decode(
        self, token_ids: Any, /, *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool
    ) -> Any: ...


class Pieces:
    """The pieces of a text that continues the text of `before`, token by token. Concatenated, they give the text.

    A piece is the text of one token, or of the tokens that share one character's bytes. It is decoded together with the
    preceding tokens, because decoders treat the first token differently: many strip its leading space. Special tokens
    add no text, as with `skip_special_tokens`; after `add`, `own` holds the special token's text. With `special=True`,
    special tokens are decoded like other tokens.
    """

    def __init__(self, tokenizer: Decoder, before: Sequence[int] = (), special: bool = False):
        self._tokenizer, self._special = tokenizer, special
        size = CONTEXT
        self._ids = [int(token) for token in before[-size:]]
        while size < len(before) and (not (text := self._decoded(self._ids)) or text.startswith(LOST)):
            size *= 4
            self._ids = [int(token) for token in before[-size:]]
        self._begin = len(self._ids)  # index of the first token without a piece; earlier tokens are only context
        self._start = self._whole = self._decoded(self._ids)
        self._owed = ""  # if `before` ends within a character: the part of the first piece's text that belongs to it
        for cut in range(1, CHARACTER) if self._start.endswith(LOST) else ():
            start = self._decoded(self._ids[:-cut])
            if not start.endswith(LOST):
                self._owed, self._start, self._begin = self._whole[len(start) :], start, self._begin - cut
                break
        self.open = 0  # tokens that have no piece yet
        self.own = ""  # the last token's own text, if it is special

    def add(self, token: int) -> str:
        """Add a token and return the next piece, which is empty if the token ends within a character."""
        text = self._decoded([*self._ids, token])
        self.own = self._special_text(token, text)
        if self.own:
            return self._close()
        self._ids.append(token)
        self._whole = text
        self.open += 1
        if text.endswith(LOST):
            return "" if self.open < CHARACTER else self._settled()
        return self._close()

    def rest(self) -> str:
        """The text of the tokens that have no piece yet."""
        return self._after(self._whole, self._ids[self._begin :]) if self.open else ""

    def likely(self, token: int) -> str:
        """The text that `token` would have if it were the next token."""
        text = self._decoded([*self._ids, token])
        after = self._after(text, [*self._ids[self._begin :], token]).removeprefix(self.rest())
        return self._special_text(token, text) or after

    def whole(self, ids: Sequence[int]) -> str:
        """The text of all `ids` at once: all pieces, and whatever remains of an incomplete character."""
        text = self._decoded([*self._ids, *ids])
        if not self._owed and text.startswith(self._start) and LOST not in text[len(self._start) :]:
            return text[len(self._start) :]
        return "".join(map(self.add, ids)) + self.rest()

    def _after(self, text: str, new: Sequence[int]) -> str:
        """The text that the tokens `new` add to the text of the tokens before them; `text` is the text of both."""
        if text.startswith(self._start):
            return text[len(self._start) :].removeprefix(self._owed)
        return self._decoded(new)  # some decoders replace a whole series of bytes if one of them is invalid

    def _special_text(self, token: int, text: str) -> str:
        """The text of a special token; empty for other tokens. `text` is the whole text including the token."""
        if self._special or text != self._whole or self._decoded([token]):
            return ""
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _settled(self) -> str:
        """The text of the open tokens that no later token can complete; the last open tokens may begin a character."""
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

    def _close(self) -> str:
        """Close the open tokens and return their piece. If it has text, it is the context of later tokens."""
        piece = self.rest()
        if piece:
            del self._ids[: self._begin]
        elif self._start or len(self._ids) > CONTEXT:
            del self._ids[self._begin :]
        self._begin, self._owed, self.open = len(self._ids), "", 0
        self._start = self._whole = self._decoded(self._ids)
        return piece

    def _decoded(self, ids: Sequence[int]) -> str:
        skips = not self._special
        return str(self._tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False))


def pieces(ids: Sequence[int], tokenizer: Decoder, before: Sequence[int] = ()) -> Iterator[tuple[int, str]]:
    """The text of `ids`, with special tokens, in pieces with their numbers of tokens; it continues that of `before`."""
    reader, count = Pieces(tokenizer, before, special=True), 0
    for token in ids:
        count += 1
        text = reader.add(int(token))
        if count > reader.open:
            yield count - reader.open, text
            count = reader.open
    if count:
        yield count, reader.rest()
