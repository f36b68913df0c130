"""The engine (protocol.py) over vLLM in any process: pushed weights are tagged, and requests name the tag."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.batch import Example, Node, pack
from posttrain.config.schema.rollout import VllmConfig
from posttrain.engines.embedded import evaluating
from posttrain.engines.protocol import Completion, Finished, Request, Sampling, not_finite, requests, timed
from posttrain.engines.stops import StopTexts
from posttrain.engines.vllm.client import Server
from posttrain.engines.vllm.core import Core, RawCompletion
from posttrain.engines.vllm.weights import Adapters, Named, adapters_of, fingerprint, weights_of
from posttrain.errors import VitalSignError
from posttrain.models.families import base_of, check_positions, positions_of
from posttrain.scoring import Scorer

PROBE_TOKENS = 8
AT_ONCE = 1024  # completions of a request, where finished ones are awaited
# Maximum mean difference (nats) between engine and trainer over the probe's tokens that rounding explains.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


class Host(Protocol):
    """The process of vLLM: this one (core.py) or another (client.py)."""

    vocabulary: int
    positions: int

    def load(self, mark: str, weights: Iterable[Named]) -> None: ...

    def generate(self, mark: str, asked: Sequence[Request], sampling: Sampling) -> list[list[RawCompletion]]: ...

    def close(self) -> None: ...


class VllmEngine:
    """Engine by vLLM, with the sampling of the other engines: in float32 the same seed gives the same tokens.

    `load` copies the weights, with active adapters merged; when adapters are switched later, the weights are pushed
    again. Every push is verified: all of the model's weights arrived, the prefix cache was
    emptied, and a few sampled tokens have the trainer's log-probabilities.

    Raises ModelError if vLLM cannot run the model, ConfigError if it is not installed, EngineError if its server
    fails, VitalSignError if it does not serve the weights it was given.
    """

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        version: int = 0,
        settings: VllmConfig | None = None,
    ):
        base = base_of(policy)
        self.tokenizer = tokenizer
        self.host: Host = _host(settings or VllmConfig())(base.config, type(base).__name__, base.dtype, tokenizer)
        self._run, self._pushes = uuid.uuid4().hex[:12], 0
        self._pushed: int | None = None  # fingerprint of the pushed weights with their adapters
        self._adapters: Adapters = ()
        try:
            self.load(policy, version)
        except BaseException:
            self.close()
            raise

    def load(self, policy: nn.Module, version: int) -> None:
        """Push the policy's weights if they have changed since the last push."""
        self.policy, self.version = policy, version
        self._push()

    def release(self) -> None:
        """vLLM keeps its memory, which rollout.vllm.gpu_memory_utilization limits."""

    def close(self) -> None:
        """Stop the server, if we started one, and release memory."""
        self.host.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[Sequence[int]] | None = None,
        finished: Finished | None = None,
    ) -> list[list[Completion]]:
        config = base_of(self.policy).config
        positions = min(self.host.positions, positions_of(config) or self.host.positions)
        asked = requests(prompts, sampling, seeds, limits, vocabulary=self.host.vocabulary, positions=positions)
        StopTexts(sampling.stop, self.tokenizer)  # refuses stop strings without a tokenizer
        if not asked:
            return []
        check_positions(config, max(len(request.tokens) + max(request.limits) - 1 for request in asked))
        if adapters_of(self.policy) != self._adapters:
            self._push()
        at_once = len(asked) if finished is None else max(1, AT_ONCE // sampling.num_generations)
        found: list[list[Completion]] = []
        for start in range(0, len(asked), at_once):
            some, began = asked[start : start + at_once], time.perf_counter()
            sampled = [[self._completion(one) for one in group] for group in self._generate(some, sampling)]
            found += timed(sampled, time.perf_counter() - began)
            if finished is not None:
                for request in some:
                    finished(request.index, found[request.index])
        return found

    def _completion(self, one: RawCompletion) -> Completion:
        return Completion(one.tokens, one.logprobs, "stop" if one.stopped else "length", self.version)

    @property
    def _mark(self) -> str:
        return f"{self._run}-{self._pushes}"

    def _generate(self, asked: Sequence[Request], sampling: Sampling) -> list[list[RawCompletion]]:
        sampled = self.host.generate(self._mark, asked, sampling)
        values = torch.tensor([value for group in sampled for one in group for value in one.logprobs])
        if not values.isfinite().all():
            raise not_finite()
        return sampled

    def _push(self) -> None:
        now, adapters = fingerprint(self.policy), adapters_of(self.policy)
        if (now, adapters) == (self._pushed, self._adapters):
            return
        self._pushed = None
        self._pushes += 1
        self.host.load(self._mark, weights_of(self.policy))
        self._prove()
        self._pushed, self._adapters = now, adapters

    def _prove(self) -> None:
        """Sample a few tokens, and compare their log-probabilities with the trainer's."""
        base = base_of(self.policy)
        prompt = [token % self.host.vocabulary for token in (3, 1, 4, 1)]
        room = min(positions_of(base.config) or self.host.positions, self.host.positions) - len(prompt) + 1
        count = min(PROBE_TOKENS, room)
        if count < 1:
            return
        [[sampled]] = self._generate([Request(0, prompt, 0, (count,))], Sampling(max_completion_length=count))
        [packed] = pack([Example((Node(prompt, children=(Node(sampled.tokens, trained=True),)),), 0)], 1 << 20)
        with torch.inference_mode(), evaluating(self.policy):
            trainer = Scorer(self.policy)(packed.to(base.device)).logprob_N.float().cpu()
        difference = (trainer - torch.tensor(sampled.logprobs)).abs().mean().item()
        if not difference <= ROUNDING.get(base.dtype, ROUNDING[torch.bfloat16]):
            raise VitalSignError(
                f"vLLM does not serve the weights it was given: after the push of version {self.version} the "
                f"log-probabilities of tokens differ by {difference:.3g} nats from the trainer's. It holds stale "
                "weights, or computes this model differently: set rollout.engine: embedded, and report this model"
            )


def _host(settings: VllmConfig) -> Callable[..., Host]:
    """The function that makes a host from (config, architecture, dtype, tokenizer)."""
    if settings.mode == "server":
        return lambda config, architecture, dtype, tokenizer: Server(settings, config, architecture, dtype, tokenizer)
    share = settings.gpu_memory_utilization
    return lambda config, architecture, dtype, tokenizer: Core(
        config, architecture, dtype, gpu_memory_utilization=share, tokenizer=tokenizer, beside_trainer=True
    )
