"""Our drawing inside vLLM, so that filters, random streams and log-probabilities are those of the other engines.

vLLM is asked for greedy tokens and for the processed logits beside them. This processor draws each row's token, leaves
that one alone above minus infinity, and gives it its log-probability as logit: what vLLM then takes is the token, and
what it returns beside it the log-probability. Imported by vLLM itself, where the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)

from posttrain.engines.protocol import Sampling
from posttrain.engines.sampling import draw
from posttrain.engines.streams import keys, token_words
from posttrain.engines.vllm.core import ARGUMENT


@dataclass(eq=False, slots=True)
class SampledRow:
    """A live request."""

    sampling: Sampling
    stream: tuple[int, int]
    drawn: list[int]  # vLLM's own list, which grows


@dataclass(eq=False, slots=True)
class Alike:
    """Rows that are drawn in the same way, by their places in the batch."""

    sampling: Sampling
    rows: list[SampledRow]
    places_B: Tensor
    key_B2: Tensor


class Drawing(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.device = device
        self.rows: dict[int, SampledRow] = {}
        self.alike: list[Alike] | None = None  # made anew when rows come, go or move
        self.words_V: Tensor | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self.rows, batch_update, _row):
            self.alike = None

    def apply(self, logits: Tensor) -> Tensor:
        if not self.rows:
            return logits
        if self.words_V is None:
            self.words_V = token_words(logits.shape[-1], logits.device)
        if self.alike is None:
            self.alike = self._alike()
        for some in self.alike:
            whole = len(some.rows) == len(logits)  # then places are 0, 1, 2 …
            place_B = torch.tensor([len(row.drawn) for row in some.rows], device=self.device)
            chosen = logits.clone() if whole else logits[some.places_B]
            token_B, logprob_B = draw(chosen, some.sampling, self.words_V, some.key_B2, place_B)
            logits.index_fill_(0, some.places_B, -torch.inf)
            logits[some.places_B, token_B] = logprob_B
        return logits

    def _alike(self) -> list[Alike]:
        found: dict[Sampling, list[int]] = {}
        for place in sorted(self.rows):
            found.setdefault(self.rows[place].sampling, []).append(place)
        made = []
        for sampling, places in found.items():
            rows = [self.rows[place] for place in places]
            key_B2 = keys([row.stream for row in rows], self.device)
            made.append(Alike(sampling, rows, torch.tensor(places, device=self.device), key_B2))
        return made


def _row(params: SamplingParams, prompt: list[int] | None, drawn: list[int]) -> SampledRow | None:
    given = (params.extra_args or {}).get(ARGUMENT)
    if given is None:
        return None
    sampling, seed, number = given
    return SampledRow(sampling, (seed, number), drawn)
