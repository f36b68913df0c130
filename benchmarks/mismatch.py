"""An engine that samples with other weights than the trainer's, on purpose: old ones, or ones rounded to few bits.

posttrain's engines have the current weights, and a run refuses others. Corrections for a mismatch can only be measured
where there is one, so `mismatched` puts such an engine into the runs of this process, and removes the check that
refuses it. Validation still uses the policy's own weights.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from posttrain.engines import Completion, EmbeddedEngine, Finished, Sampling
from posttrain.engines.protocol import Request
from posttrain.models.families import base_of
from posttrain.models.quantised import linear_layers

Weights = Callable[[nn.Module], dict[str, Tensor]]  # called after each step; the weights to sample with, by name


class MismatchedEngine(EmbeddedEngine):
    """The embedded engine, with the weights that `weights` returns for the policy while it samples."""

    def __init__(self, weights: Weights, policy: nn.Module, *args, **settings):
        self._weights, self.exact = weights, False
        super().__init__(policy, *args, **settings)

    def load(self, policy: nn.Module, version: int) -> None:
        super().load(policy, version)
        self._sampled = self._weights(policy)

    def _completed(
        self, requests: list[Request], sampling: Sampling, finished: Finished | None
    ) -> list[list[Completion]]:
        if self.exact:
            return super()._completed(requests, sampling, finished)
        own = {
            name: weight.detach().clone() for name, weight in self.policy.named_parameters() if name in self._sampled
        }
        _copy(self.policy, self._sampled)
        try:
            return super()._completed(requests, sampling, finished)
        finally:
            _copy(self.policy, own)


@torch.no_grad()
def _copy(policy: nn.Module, weights: dict[str, Tensor]) -> None:
    parameters = dict(policy.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)


def old(steps: int) -> Weights:
    """The weights of this many steps ago; of the start, before there are any."""
    kept: deque[dict[str, Tensor]] = deque(maxlen=steps + 1)

    def weights(policy: nn.Module) -> dict[str, Tensor]:
        kept.append({name: weight.detach().clone() for name, weight in policy.named_parameters()})
        return kept[0]

    return weights


def rounded(bits: int) -> Weights:
    """The weights of linear layers in so many bits, with one scale per row, as in LLM.int8()."""

    def weights(policy: nn.Module) -> dict[str, Tensor]:
        inside = {id(layer.weight) for layer in linear_layers(base_of(policy)).values()}
        return {name: _rounded(w.detach(), bits) for name, w in policy.named_parameters() if id(w) in inside}

    return weights


def _rounded(weight: Tensor, bits: int) -> Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


@contextmanager
def mismatched(weights: Weights) -> Iterator[None]:
    """A context in which runs sample with these weights."""
    from posttrain.recipes import online

    evaluate = online.evaluate

    def evaluate_exactly(loop, sample, store) -> None:
        sample.engine.exact = True
        try:
            evaluate(loop, sample, store)
        finally:
            sample.engine.exact = False

    def engine(_name, policy, tokenizer=None, *, version=0, **_settings) -> MismatchedEngine:
        return MismatchedEngine(weights, policy, tokenizer, version=version)

    with (
        patch("posttrain.training.evaluation.make_engine", engine),
        patch.object(online, "check_sampler", lambda *_arguments: None),
        patch.object(online, "evaluate", evaluate_exactly),
    ):
        yield
