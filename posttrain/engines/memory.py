"""The tensors of generation: allocated for a call, or on a GPU kept between calls with the recordings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from posttrain.engines.cache import Buffers, Cache
from posttrain.engines.decode import State, Stepper
from posttrain.engines.graphs import Recordings, StaticStepper
from posttrain.engines.protocol import Sampling
from posttrain.engines.room import Room

MOST_KEPT = 4  # sampling settings whose state and recordings are kept: those of a run and of its evaluations


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory for completions, and its stepper."""

    room: Room
    cache: Cache
    state: State
    stepper: Stepper

    @classmethod
    def of(cls, room: Room, stepper: Stepper, buffers: Buffers | None = None) -> Memory:
        cache = Cache(room, stepper.still, buffers)
        return cls(room, cache, State.empty(room, stepper.device), stepper)


class Kept:
    """The memory of static shapes that is kept for one policy.

    Evaluation often samples another number of completions than training, at another temperature: each sampling setting
    has its own state and recordings, while the keys and values of all use the same buffers in turn. A call only uses
    the part of the memory within its own room, so that the needs of earlier calls have no influence.
    """

    def __init__(self, policy: nn.Module, device: torch.device):
        self.policy, self.device = policy, device
        self.recordings = Recordings()
        self.memories: dict[Sampling, Memory] = {}
        self._buffers = Buffers(0)
        self._steppers: dict[Sampling, StaticStepper] = {}  # survive `release`: compiled code is used again

    def memory(self, sampling: Sampling, room: Room, tokens: int) -> Memory:
        """Memory that covers `room`, and the earlier room too if that is at most `tokens`."""
        self.recordings.check(self.policy)
        key = replace(sampling, seed=0, max_completion_length=1, stop=())
        held = self.memories.get(key)
        if held is not None and held.room.covers(room):
            return held
        if held is not None and (both := held.room.joined(room)).tokens <= tokens:
            room = both
        del held
        stepper = self._stepper(key)
        self.memories.pop(key, None)
        self.recordings.drop(stepper)
        if room.tokens > self._buffers.tokens:
            self.release()  # before the new allocation: there may not be memory for both
            self._buffers = Buffers(room.tokens, finite=True)
        self.memories[key] = Memory.of(room, stepper, self._buffers)
        return self.memories[key]

    def _stepper(self, key: Sampling) -> StaticStepper:
        if key not in self._steppers:
            while len(self._steppers) >= MOST_KEPT:
                oldest = next(iter(self._steppers))
                self.recordings.drop(self._steppers.pop(oldest))
                self.memories.pop(oldest, None)
            compiled = self.device.type == "cuda"
            self._steppers[key] = StaticStepper(self.policy, key, self.device, self.recordings, compiled)
        return self._steppers[key]

    def release(self) -> None:
        """Release everything except compiled code."""
        self.memories.clear()
        self.recordings.graphs.clear()
        self._buffers = Buffers(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
