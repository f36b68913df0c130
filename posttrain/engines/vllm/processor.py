"""Our sampling inside vLLM, so that filters, random streams and log-probabilities equal those of the other engines.

vLLM decodes greedily and returns the processed logit of each token. This processor samples each row's token, sets all
other logits to minus infinity, and sets the token's logit to its log-probability. So vLLM takes this token and returns
its log-probability. vLLM imports this module in the engine's process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates  # pyright: ignore[reportMissingImports]

from posttrain.base.words import by_key
from posttrain.engines.protocol import Sampling
from posttrain.engines.sampling import keys, sample_tokens, token_words
from posttrain.engines.vllm.core import ARGUMENT


@dataclass(eq=False, slots=True)
class SampledRow:
    """A live request."""

    sampling: Sampling
    stream: tuple[int, int]
    sampled: list[int]  # the tokens sampled so far, in a list that vLLM extends


@dataclass(eq=False, slots=True)
class Alike:
    """Rows with the same sampling settings."""

    sampling: Sampling
    rows: list[SampledRow]
    index_B: Tensor  # indices of the rows in vLLM's batch
    key_B2: Tensor


class SamplingProcessor(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.device = device
        self.rows: dict[int, SampledRow] = {}
        self.alike: list[Alike] | None = None  # rebuilt when rows are added, removed or moved
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
            whole = len(some.rows) == len(logits)  # then indices are 0, 1, 2 …
            position_B = torch.tensor([len(row.sampled) for row in some.rows], device=self.device)
            chosen = logits.clone() if whole else logits[some.index_B]
            token_B, logprob_B = sample_tokens(chosen, some.sampling, self.words_V, some.key_B2, position_B)
            logits.index_fill_(0, some.index_B, -torch.inf)
            logits[some.index_B, token_B] = logprob_B
        return logits

    def _alike(self) -> list[Alike]:
        by_settings = by_key((self.rows[index].sampling, index) for index in sorted(self.rows))
        made = []
        for sampling, indices in by_settings.items():
            rows = [self.rows[index] for index in indices]
            key_B2 = keys([row.stream for row in rows], self.device)
            made.append(Alike(sampling, rows, torch.tensor(indices, device=self.device), key_B2))
        return made


def _row(params: SamplingParams, prompt: list[int] | None, sampled: list[int]) -> SampledRow | None:
    argument = (params.extra_args or {}).get(ARGUMENT)
    if argument is None:
        return None
    sampling, seed, number = argument
    return SampledRow(sampling, (seed, number), sampled)
