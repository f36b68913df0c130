"""The engine (protocol.py) over vLLM in any process: pushed weights are tagged, and requests name the tag."""

import json
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError, VitalSignError
from posttrain.batch import Example, Node, pack
from posttrain.config.schema.rollout import VllmConfig
from posttrain.engines.embedded import evaluating
from posttrain.engines.protocol import Completion, Finished, Request, Sampling, not_finite, requests, timed
from posttrain.engines.stops import StopTexts
from posttrain.engines.vllm.core import Core, RawCompletion
from posttrain.engines.vllm.servers import Ask, Prove, Servers, Weights
from posttrain.engines.vllm.weights import Adapters, adapters_of, fingerprint, weights_of
from posttrain.models.families import base_of, check_positions, positions_of
from posttrain.models.sharding import architecture_of, whole
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.scoring import Scorer

PROBE_TOKENS = 8
AT_ONCE = 1024  # completions of a request, where finished ones are awaited
# Maximum mean difference (nats) between engine and trainer over the probe's tokens that rounding explains.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


class Host(Protocol):
    """Where vLLM is: in this process, or in others (servers.py)."""

    vocabulary: int
    positions: int

    def load(self, mark: str, weights: Weights, prove: Prove) -> None: ...

    def generate(self, mark: str, asked: Sequence[Request], sampling: Sampling) -> list[list[RawCompletion]]: ...

    def close(self) -> None: ...


class Colocated:
    """vLLM in this process as a host."""

    def __init__(self, core: Core):
        self.core, self.vocabulary, self.positions = core, core.vocabulary, core.positions

    def load(self, mark: str, weights: Weights, prove: Prove) -> None:
        self.core.load(mark, weights())
        prove(lambda asked, sampling: self.core.generate(mark, asked, sampling))

    def generate(self, mark: str, asked: Sequence[Request], sampling: Sampling) -> list[list[RawCompletion]]:
        return self.core.generate(mark, asked, sampling)

    def close(self) -> None:
        self.core.close()


class VllmEngine:
    """Engine by vLLM, with the sampling of the other engines: in float32 the same seed gives the same tokens.

    `load` copies the weights, with active adapters merged; when adapters are switched later, the weights are pushed
    again. Every push is verified: all of the model's weights arrived, the prefix cache was
    emptied, and a few sampled tokens have the trainer's log-probabilities.

    On several ranks every method is called by all of them together, `generate` also by one without prompts.

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
        ranks: Ranks = ALONE,
    ):
        self.tokenizer, self._ranks = tokenizer, ranks
        self._scoring = threading.Lock()  # several servers may be proved side by side
        with whole(policy):  # its dtype is then that of the computation
            self.host: Host = _host(settings or VllmConfig(), policy, tokenizer, ranks)
        self._run, self._pushes = ranks.gather(uuid.uuid4().hex[:12])[0], 0
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
        with whole(policy):
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
        asked = self._asked(prompts, sampling, seeds, limits)
        if not asked and self._ranks.size == 1:
            return []
        if adapters_of(self.policy) != self._adapters:
            if self._ranks.size > 1:
                raise VitalSignError("adapters were switched without a push of the weights, on several ranks")
            self._push()
        at_once = len(asked) if finished is None else AT_ONCE // sampling.num_generations
        found: list[list[Completion]] = []
        for start in range(0, max(1, len(asked)), max(1, at_once)):
            some, began = asked[start : start + max(1, at_once)], time.perf_counter()
            groups = _finite(self.host.generate(self._mark, some, sampling))
            sampled = [[_completion(raw, self.version) for raw in group] for group in groups]
            found += timed(sampled, time.perf_counter() - began)
            if finished is not None:
                for request in some:
                    finished(request.index, found[request.index])
        return found

    def _asked(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None,
        limits: Sequence[Sequence[int]] | None,
    ) -> list[Request]:
        """The requests of these arguments of `generate`, checked."""
        config = base_of(self.policy).config
        positions = min(self.host.positions, positions_of(config) or self.host.positions)
        asked = requests(prompts, sampling, seeds, limits, vocabulary=self.host.vocabulary, positions=positions)
        StopTexts(sampling.stop, self.tokenizer)  # refuses stop strings without a tokenizer
        if asked:
            check_positions(config, max(len(request.tokens) + max(request.limits) - 1 for request in asked))
        return asked

    @property
    def _mark(self) -> str:
        return f"{self._run}-{self._pushes}"

    def _push(self) -> None:
        now, adapters = fingerprint(self.policy), adapters_of(self.policy)
        if (now, adapters) == (self._pushed, self._adapters):
            return
        self._pushed = None
        self._pushes += 1
        self.host.load(self._mark, lambda: weights_of(self.policy), self._prove)
        self._pushed, self._adapters = now, adapters

    def _prove(self, ask: Ask) -> None:
        """Sample a few tokens, and compare their log-probabilities with the trainer's."""
        base = base_of(self.policy)
        prompt = [token % self.host.vocabulary for token in (3, 1, 4, 1)]
        room = min(positions_of(base.config) or self.host.positions, self.host.positions) - len(prompt) + 1
        count = min(PROBE_TOKENS, room)
        if count < 1:
            return
        [[sampled]] = _finite(ask([Request(0, prompt, 0, (count,))], Sampling(max_completion_length=count)))
        [packed] = pack([Example((Node(prompt, children=(Node(sampled.tokens, trained=True),)),), 0)], 1 << 20)
        with self._scoring, torch.inference_mode(), evaluating(self.policy):
            trainer = Scorer(self.policy)(packed.to(base.device)).logprob_N.float().cpu()
        difference = (trainer - torch.tensor(sampled.logprobs)).abs().mean().item()
        if not difference <= ROUNDING.get(base.dtype, ROUNDING[torch.bfloat16]):
            raise VitalSignError(
                f"vLLM does not serve the weights it was given: after the push of version {self.version} the "
                f"log-probabilities of tokens differ by {difference:.3g} nats from the trainer's. It holds stale "
                "weights, or computes this model differently: set rollout.engine: embedded, and report this model"
            )


def _completion(raw: RawCompletion, version: int) -> Completion:
    return Completion(raw.tokens, raw.logprobs, "stop" if raw.stopped else "length", version)


def _finite(sampled: list[list[RawCompletion]]) -> list[list[RawCompletion]]:
    values = torch.tensor([value for group in sampled for one in group for value in one.logprobs])
    if not values.isfinite().all():
        raise not_finite()
    return sampled


def _host(settings: VllmConfig, policy: nn.Module, tokenizer: PreTrainedTokenizerBase | None, ranks: Ranks) -> Host:
    base = base_of(policy)
    if settings.mode == "server":
        model: dict[str, Any] = {
            "architecture": architecture_of(base),
            "config": json.loads(json.dumps(base.config.to_dict(), default=str)),
            "dtype": str(base.dtype).removeprefix("torch."),
            "tokenizer": _files_of(tokenizer),
        }
        return Servers(settings, model, ranks)
    if ranks.size > 1:
        raise ConfigError(
            "rollout.vllm.mode: colocate does not run on several ranks, whose process group vLLM would take for its "
            "own: set rollout.vllm: {mode: server}"
        )
    share = settings.gpu_memory_utilization
    return Colocated(
        Core(
            base.config,
            type(base).__name__,
            base.dtype,
            gpu_memory_utilization=share,
            tokenizer=tokenizer,
            beside_trainer=True,
        )
    )


def _files_of(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str] | None:
    """The text files that a tokenizer is saved as."""
    if tokenizer is None:
        return None
    with TemporaryDirectory(prefix="posttrain-vllm-") as folder:
        tokenizer.save_pretrained(folder)
        files = [path for path in Path(folder).iterdir() if path.is_file()]
        return {path.name: path.read_text(encoding="utf-8") for path in files}
