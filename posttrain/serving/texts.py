"""The text of tokens as they are generated: pieces that add up to the whole text, cut at stop strings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.pieces import Pieces
from posttrain.engines.live import Alternatives

SLICE = 8192  # characters tokenised at a time to count tokens
ADVICE = ": shorten it, or start the server with a larger --context"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a one-byte token, in vocabularies with byte fallback


class Bound:
    """Refuses texts that do not fit into `context` tokens, without tokenising them completely."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: int):
        self._tokenizer, self.context = tokenizer, context
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)

    def check(self, *texts: str) -> None:
        """Raise DataError if the texts together have too many tokens."""
        characters, most = sum(map(len, texts)), self.context * self._longest
        if characters > most:
            raise DataError(
                f"the text has {characters:,} characters; {self.context:,} tokens have at most {most:,}{ADVICE}"
            )
        size, count = max(SLICE, 4 * self._longest), 0
        for text in texts if characters > size else ():
            for start in range(0, len(text), size):
                count += len(self._tokenizer(text[start : start + size], add_special_tokens=False).input_ids)
                if start:  # the cut between two slices may add tokens
                    count -= self._longest
                if count > self.context:
                    raise DataError(f"the text has more than {self.context:,} tokens{ADVICE}")


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as the API reports it. Concatenated, the `text` of all tokens gives the whole text. `bytes` are the
    token's bytes, even if they are only a part of a character."""

    id: int
    text: str
    bytes: tuple[int, ...]
    logprob: float | None


@dataclass(frozen=True, slots=True)
class ReportedToken(TokenText):
    """A token, the most likely tokens at its position, and the offset of its text, not counting special tokens."""

    offset: int
    likely: tuple[TokenText, ...]


class Report:
    """Reports the tokens of a text that continues `before`, one by one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()):
        self._tokenizer, self._pieces, self._end = tokenizer, Pieces(tokenizer, before), 0

    def add(self, token: int, logprob: float | None, likely: Alternatives, last: bool = False) -> ReportedToken:
        """Report the next token. `last`: no later token will complete its character."""
        others = tuple(self._written(id, self._pieces.likely(id), value) for id, value in likely)
        own, begin = self._pieces.likely(token), self._end
        piece = self._pieces.add(token) + (self._pieces.rest() if last else "")
        self._end += len(piece)
        bytes_ = self._written(token, own, logprob).bytes
        return ReportedToken(token, piece + self._pieces.own, bytes_, logprob, begin, others)

    def _written(self, token: int, text: str, logprob: float | None) -> TokenText:
        name = str(self._tokenizer.convert_ids_to_tokens(token) or "")
        if (byte := BYTE.fullmatch(name)) is not None:
            own = bytes([int(byte[1], 16)])
        elif self._alphabet and all(character in self._alphabet for character in name):
            own = bytes(self._alphabet[character] for character in name)
        else:
            own = text.encode(errors="replace")
        return TokenText(token, text, tuple(own), logprob)

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """The byte for each character in a byte-level vocabulary; empty for other vocabularies."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        if decoder is None or b"ByteLevel" not in decoder.__getstate__():
            return {}
        shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]  # written as characters from 256 on
        return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


class Streamed:
    """The text of a completion as sent to the client: what follows `prompt`, without the stop token, up to the first
    stop string.

    Text that may be the start of a stop string is held back, and so is a stop token, which is sent if tokens follow it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        stops: Sequence[str],
        prompt: Sequence[int] = (),
    ):
        self._pieces, self._ends, self._stops = Pieces(tokenizer, prompt), frozenset(stop_token_ids), tuple(stops)
        self._ended: list[int] = []
        self._held = ""
        self._stopped = False
        self.sent = 0  # characters sent so far

    def add(self, token: int) -> str:
        before, self._ended = self._ended, [token] if token in self._ends else []
        return self._sent("".join(map(self._pieces.add, before if self._ended else [*before, token])))

    def end(self) -> str:
        """The rest of the text; call this when the completion is complete."""
        sent = self._sent(self._pieces.rest())
        held, self._held = self._held, ""
        self.sent += 0 if self._stopped else len(held)
        return sent if self._stopped else sent + held

    def clipped(self, offset: int) -> int:
        """`offset`, limited to the length of the text if a stop string has cut it."""
        return min(offset, self.sent) if self._stopped else offset

    def _sent(self, text: str) -> str:
        if self._stopped:
            return ""
        text = self._held + text
        sent = cut(text, self._stops)
        if sent != text:
            self._stopped, self._held = True, ""
        else:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            sent, self._held = text[: len(text) - held], text[len(text) - held :]
        self.sent += len(sent)
        return sent


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
