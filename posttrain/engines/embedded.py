"""The engine inside the training process: it runs the policy's own modules, so it always has the current weights.

A call of `generate` has as many live completions as fit in the cache. A prompt is prefilled once, all its completions
read its keys and values (cache.py), and every step gives each live completion its next token (decode.py). Finished rows
are removed, the last rows move into the gaps, and new prompts enter when a complete group fits (generation.py).
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import ModelError
from posttrain.engines.cache import FEWEST_COLUMNS, Room, cache_tokens
from posttrain.engines.decode import Stepper
from posttrain.engines.generation import Generation, Kept, Memory
from posttrain.engines.protocol import Completed, Engine, Finished, Request, Sampling, StopTexts, checked_requests
from posttrain.engines.turns import Conversing, Follow, Started, Turn
from posttrain.models.families import FAMILIES, UNKNOWN, base_of, check_positions, head_layer, is_packed, trains_rows
from posttrain.models.matmul import packed_weights

MAX_ROWS = 512  # maximum number of live completions; more are hardly faster


class EmbeddedEngine(Engine):
    """Engine (see protocol.py) for families that take packs. Only stop strings need a `tokenizer`.

    The policy is a plain transformers model or a PEFT model; `generate` uses the adapters that are active when it is
    called. In float32, log-probabilities match those of `posttrain.scoring` within 1e-5.

    At most `max_rows` completions are live. Their keys and values, and those of their prompts, take at most
    `cache_bytes` (None: the device's default). `static`: whether steps have few shapes and, on a GPU, are captured as
    CUDA graphs (decode.py); None: only on a GPU. Memory for static steps is kept between calls, and has room for
    prompts of at least `longest_prompt` tokens.
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
        """Use `policy` from now on. Its weights are not copied; if it is the same module, only the version changes."""
        refuse_unsupported(base_of(policy))
        self.policy, self.version = policy, version

    def release(self) -> None:
        """Release the memory that static steps keep between calls: the cache and the captured CUDA graphs."""
        if self._kept is not None:
            self._kept.release()

    def close(self) -> None:
        self.release()
        self._kept = None

    def _completed(self, requests: list[Request], sampling: Sampling, finished: Finished | None) -> Completed:
        base, head = base_of(self.policy), head_layer(self.policy)
        if not requests:
            return []
        check_positions(base.config, max(request.longest for request in requests))
        texts = StopTexts(sampling.stop, self.tokenizer)
        with torch.inference_mode(), evaluating(self.policy), packed_weights(self.policy, head) as rows_step:
            memory, room = self._memory(base, requests, sampling, head.weight.device)
            try:
                return Generation(memory, room, requests, self.version, rows_step, texts, finished).completions()
            except BaseException:
                self.release()  # leftovers in the memory may not be finite, and no mask hides NaN
                raise

    def converse(
        self, started: Started, sampling: Sampling, *, follow: Follow, longest: int, branching: bool = False
    ) -> None:
        """Hold conversations (turns.py) of at most `longest` tokens; every token of them is computed once."""
        base, head = base_of(self.policy), head_layer(self.policy)
        check_positions(base.config, longest)
        texts = StopTexts(sampling.stop, self.tokenizer)
        with torch.inference_mode(), evaluating(self.policy), packed_weights(self.policy, head) as rows_step:
            tokens = cache_tokens(base.config, base.dtype, head.weight.device, self.cache_bytes)
            own = max(FEWEST_COLUMNS, sampling.max_completion_length)
            rows = max(1, min(self.max_rows, len(started), tokens // (longest + own)))
            memory = Memory.of(Room(rows, rows, 1, longest, own), Stepper(self.policy, sampling, head.weight.device))
            Conversing(memory, started, self.version, rows_step, texts, self._next, follow, branching).run()

    def _next(self, tokens: Sequence[int], turn: Turn, sampling: Sampling) -> Request:
        """The request of a conversation's next reply."""
        return checked_requests([tokens], sampling, [turn.seed], [[turn.limit]], *self._sizes)[0]

    def _memory(
        self, base: PreTrainedModel, requests: Sequence[Request], sampling: Sampling, device: torch.device
    ) -> tuple[Memory, Room]:
        """Return a call's memory and its room: new for the call, or, with static shapes, kept and rounded up."""
        static = device.type == "cuda" if self.static is None else self.static
        static = static and not trains_rows(base.get_input_embeddings())  # their lookup cannot be captured
        tokens = cache_tokens(base.config, base.dtype, device, self.cache_bytes)
        longest, own = max(len(r.tokens) for r in requests), max(max(r.limits) for r in requests)
        if static:  # the maximum, so that all calls have the same shapes
            longest, own = max(longest, self.longest_prompt), sampling.max_completion_length
        room = Room.of(
            len(requests), sampling.num_generations, longest, own, max_rows=self.max_rows, tokens=tokens, static=static
        )
        if not static:
            return Memory.of(room, Stepper(self.policy, sampling, device)), room
        if self._kept is None or self._kept.policy is not self.policy:
            self.close()
            self._kept = Kept(self.policy, device)
        return self._kept.memory(sampling, room, tokens), room


def refuse_unsupported(base: PreTrainedModel) -> None:
    """Raise ModelError for a model of a family that the engine does not run."""
    if not is_packed(base):
        raise ModelError(
            f"the embedded engine needs packed attention, but this {base.config.model_type} has "
            f"{base.config._attn_implementation}: set rollout.engine: transformers"
        )
    if FAMILIES.get(base.config.model_type, UNKNOWN).recurrent:
        raise ModelError(
            f"the embedded engine caches only keys and values, but layers of this {base.config.model_type} have a "
            "recurrent state: set rollout.engine: transformers"
        )


@contextlib.contextmanager
def evaluating(policy: nn.Module) -> Iterator[None]:
    """Context in which every module is in evaluation mode, without dropout."""
    training = [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
