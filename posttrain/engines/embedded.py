"""The engine inside the training process: it runs the policy's own modules, so new weights are there at once.

A call of `generate` keeps as many completions alive as there is room for (room.py). A prompt is prefilled once, its
keys and values are read by all its completions (cache.py), and every step gives each live completion its next token
(decode.py). Finished rows leave, the last ones move into their places, and when a whole group fits the next prompts
enter (generation.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.engines.decode import Stepper
from posttrain.engines.generation import Generation
from posttrain.engines.memory import Kept, Memory
from posttrain.engines.protocol import Completion, Request, Sampling, requests
from posttrain.engines.room import Room, cache_tokens
from posttrain.engines.stops import StopTexts
from posttrain.errors import ModelError
from posttrain.models.families import base_of, check_positions, is_packed, is_recurrent, positions_of
from posttrain.models.matmul import packed_weights

MAX_ROWS = 512  # more live completions are hardly faster


class EmbeddedEngine:
    """Engine (see protocol.py) for families that take packs. `tokenizer` is needed for stop texts only.

    The policy may be a plain transformers model or a PEFT one; adapters count as they are switched when `generate` is
    called. In float32 log-probabilities are those of `posttrain.scoring` to 1e-5.

    At most `max_rows` completions are alive, whose keys and values, with those of their prompts, take `cache_bytes`
    (None: the device's default). `static` says whether steps have few shapes and are recorded (graphs.py); by default
    they are on a GPU. What such steps need is kept between calls, and laid out for prompts of `longest_prompt` tokens.
    """

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        version: int = 0,
        max_rows: int = MAX_ROWS,
        cache_bytes: int | None = None,
        longest_prompt: int = 1,
        static: bool | None = None,
    ):
        self.tokenizer, self.max_rows, self.static = tokenizer, max_rows, static
        self.cache_bytes, self.longest_prompt = cache_bytes, longest_prompt
        self._kept: Kept | None = None
        self.load(policy, version)

    def load(self, policy: nn.Module, version: int) -> None:
        """Run on `policy` from now on. Its weights are used where they are, so for the same module this is a number."""
        base = base_of(policy)
        if not is_packed(base):
            raise ModelError(
                f"the embedded engine needs packed attention, and this {base.config.model_type} has "
                f"{base.config._attn_implementation}: set rollout.engine: transformers"
            )
        if is_recurrent(base):
            raise ModelError(
                f"the embedded engine keeps keys and values alone, and layers of this {base.config.model_type} carry a "
                "recurrent state: set rollout.engine: transformers"
            )
        self.policy, self.version = policy, version

    def release(self) -> None:
        """Give back what a GPU holds between calls: the cache and the recorded steps, which are then made anew."""
        if self._kept is not None:
            self._kept.release()

    def close(self) -> None:
        self.release()
        self._kept = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Completion]]:
        base = base_of(self.policy)
        head: nn.Linear = base.get_output_embeddings()  # pyright: ignore[reportAssignmentType]
        asked = requests(
            prompts,
            sampling,
            seeds,
            limits,
            vocabulary=base.get_input_embeddings().weight.shape[0],  # pyright: ignore
            positions=positions_of(base.config),
        )
        if not asked:
            return []
        check_positions(base.config, max(len(request.tokens) + max(request.limits) - 1 for request in asked))
        texts = StopTexts(sampling.stop, self.tokenizer)
        with torch.inference_mode(), evaluating(self.policy), packed_weights(self.policy, head) as rows_step:
            memory, room = self._memory(base, asked, sampling, head.weight.device)
            try:
                return Generation(memory, room, asked, texts, self.version, rows_step).completions()
            except BaseException:
                self.release()  # it may hold what is not finite, which no mask hides
                raise

    def _memory(
        self, base: PreTrainedModel, asked: Sequence[Request], sampling: Sampling, device: torch.device
    ) -> tuple[Memory, Room]:
        """What to draw in, and how much of it: made for the call, or where shapes are static kept and rounded up."""
        static = device.type == "cuda" if self.static is None else self.static
        tokens = cache_tokens(base.config, base.dtype, device, self.cache_bytes)
        longest, own = (max(len(r.tokens) for r in asked), max(max(r.limits) for r in asked))
        if static:  # what may come, for all calls to have the same shapes
            longest, own = max(longest, self.longest_prompt), sampling.max_completion_length
        room = Room.of(
            len(asked), sampling.num_generations, longest, own, max_rows=self.max_rows, tokens=tokens, static=static
        )
        if not static:
            return Memory.of(room, Stepper(self.policy, sampling, device)), room
        if self._kept is None or self._kept.policy is not self.policy:
            self.close()
            self._kept = Kept(self.policy, device)
        return self._kept.memory(sampling, room, tokens), room


@contextlib.contextmanager
def evaluating(policy: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, without dropout, and afterwards as it was."""
    training = [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
