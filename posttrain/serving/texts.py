"""Token ids as text while they come: pieces that add up to the text of the whole, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # ends a text whose last character lacks bytes


class Pieces:
    """The pieces of a text, one for each token: together they are the decoded text of all.

    A token that ends within a character has an empty piece, and the token that completes it the whole character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: bool = False):
        self._tokenizer, self._special = tokenizer, special
        self._ids: list[int] = []
        self._start, self._read = 0, 0  # of the ids that are decoded again, and of those that have no piece yet

    def add(self, token: int) -> str:
        self._ids.append(token)
        before = self._text(self._start, self._read)
        text = self._text(self._start, len(self._ids))
        if len(text) <= len(before) or text.endswith(UNFINISHED):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def rest(self) -> str:
        """What is left at the end: an incomplete character."""
        before, text = self._text(self._start, self._read), self._text(self._start, len(self._ids))
        return text[len(before) :]

    def _text(self, start: int, stop: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=not self._special))


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The piece of every token, special ones too."""
    pieces = Pieces(tokenizer, special=True)
    return [pieces.add(token) for token in tokens]


def piece_after(tokenizer: PreTrainedTokenizerBase, previous: int | None, token: int) -> str:
    """The text that a token adds after another: many tokenizers decode a token alone without its space."""
    before = [] if previous is None else [previous]
    whole, start = tokenizer.decode([*before, token]), tokenizer.decode(before) if before else ""
    return str(whole)[len(str(start)) :]


class Streamed:
    """A completion's text as it may be sent: without stop tokens, and up to the first stop string.

    What may become a stop string is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], stops: Sequence[str]):
        self._pieces, self._ends, self._stops = Pieces(tokenizer), frozenset(stop_token_ids), tuple(stops)
        self._held = ""
        self._stopped = False

    def add(self, token: int) -> str:
        return "" if token in self._ends else self._sent(self._pieces.add(token))

    def end(self) -> str:
        """The rest, once the completion is complete."""
        sent = self._sent(self._pieces.rest())
        held, self._held = self._held, ""
        return sent if self._stopped else sent + held

    def _sent(self, text: str) -> str:
        if self._stopped:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._stopped, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
