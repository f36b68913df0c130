"""The text of tokens, from a run's tokenizer.json: by the library tokenizers alone, which needs no torch."""

import stat
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.data.pieces import pieces
from posttrain.runs.checkpoint import list_checkpoints
from posttrain.runs.summary import RunSummary

LONGEST = 64 << 20  # bytes of a tokenizer.json
_loading = threading.Lock()


class Decoder:
    """What `pieces` asks of a tokenizer, by one of the library tokenizers."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def decode(
        self,
        token_ids: Sequence[int],
        /,
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def texts_of(run: Path, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """The text of each token after a prompt: of several that hold one character, the last has it. Without a tokenizer
    their numbers."""
    decoder = decoder_of(run)
    if decoder is None:
        return [f"{token} " for token in tokens]
    found: list[str] = []
    for count, text in pieces(tokens, decoder, prompt):
        found += [*[""] * (count - 1), text]
    return found


def decoder_of(run: Path) -> Decoder | None:
    """The run's tokenizer: of its final model, its newest checkpoint, or the model it started from."""
    started = next((model.get("path") for model in RunSummary(run).model_settings), None)
    places = [run / "final", run / "best", *reversed(list_checkpoints(run))]
    if isinstance(started, str):
        places += [Path(started).expanduser(), run / started]
    for place in places:
        file = place / "tokenizer.json"
        try:
            facts = file.stat()
        except (OSError, ValueError):
            continue
        if (
            stat.S_ISREG(facts.st_mode)
            and facts.st_size <= LONGEST
            and (found := _loaded(file, facts.st_mtime_ns)) is not None
        ):
            return found
    return None


@lru_cache(maxsize=4)
def _loaded(file: Path, changed: int) -> Decoder | None:
    from tokenizers import Tokenizer

    with _loading:
        try:
            return Decoder(Tokenizer.from_file(str(file)))
        except BaseException as error:  # the library raises bare Exception for a damaged file, and panics of Rust
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return None  # the tokens stay numbers
