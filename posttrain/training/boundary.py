"""The state of a run after its last finished step, and how to restore it in the middle of the next step.

When a run fails, this state is saved, so that the resumed run repeats the failed step bit for bit.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from posttrain.memory import available_memory
from posttrain.optim.adamw import AdamW
from posttrain.store.files import rng_state
from posttrain.training.state import State

log = logging.getLogger("posttrain")


class Boundary:
    """The state after the last finished step: the loop's state, the random generators, and how to restore the weights.

    The loop's state and the generators are copied at every step. Weights and moments need no copy if a step is one
    update: forward, backward and the checks before the update do not change them. If a step has several updates,
    `copy_weights` copies them to CPU memory before the first.
    """

    state: State
    rng: tuple[dict[str, torch.Tensor], dict[str, Any]]

    def __init__(self, optimizer: AdamW, device: torch.device):
        self._optimizer, self._device = optimizer, device
        self._copies: dict[str, torch.Tensor] = {}
        self._copied_at: int | None = None  # the step of the copies
        self._has_room: bool | None = None

    def mark(self, state: State) -> None:
        """A step, or its evaluation, is finished."""
        self.state, self.rng = state.copy(), rng_state(self._device)

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy weights and moments before a step of several updates. Warns once if CPU memory is too small."""
        tensors = self._optimizer.state() | {f"{name}|master": m for name, m in self._optimizer.masters.items()}
        if self._has_room is None:
            self._has_room = self._look_for_room()
        if not self._has_room:
            return
        self._copied_at = None
        for name, tensor in tensors.items():
            if name not in self._copies:
                self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._copies[name].copy_(tensor, non_blocking=True)
        self._copied_at = self.state.step

    def go_back(self) -> bool:
        """Restore weights and moments to the last mark and drop gradients. False if the weights have changed since and
        there is no copy."""
        self._optimizer.forget()
        if self._optimizer.updates == self.state.updates:
            return True
        if self._copied_at != self.state.step:
            return False
        self._optimizer.load_state(self._copies)
        return True

    def _look_for_room(self) -> bool:
        values = sum(master.numel() for master in self._optimizer.masters.values())
        size, free = 3 * 4 * values, available_memory(torch.device("cpu"))  # masters and two moments, float32
        if free is None or free > 2 * size:
            return True
        log.warning(
            "too little CPU memory (%.1f GiB free) for a copy of weights and moments (%.1f GiB): a failure between the "
            "updates of a step loses the steps since the last checkpoint",
            free / 2**30, size / 2**30,
        )  # fmt: skip
        return False
