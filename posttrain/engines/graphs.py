"""The step on a GPU: few shapes, compiled once, and recorded as a CUDA graph for each shape.

A step of a small model launches hundreds of kernels, each shorter than its launch. Recorded once, they are replayed by
one call. A recording knows addresses and sizes, so the state and the cache stay where they are between calls of
`generate`, and shapes are rounded up: rows to a power of two, columns to some hundreds. Rows beyond the live ones are
computed and thrown away.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from posttrain.engines.cache import Cache
from posttrain.engines.decode import Shape, State, Stepper
from posttrain.engines.protocol import Sampling

log = logging.getLogger("posttrain")

FEWEST_ROWS = 8
COLUMNS = 256  # of completions, a multiple of it
STEPS_BETWEEN_CHECKS = 8  # steps without asking the GPU which rows are done; those that are stand still
WARM_UPS = 2  # runs before a recording, in which libraries choose their kernels and allocate their memory


class StaticStepper(Stepper):
    """A stepper of few shapes over one state and one cache; recorded where they are on a GPU.

    `compiled` lets torch.compile fuse what lies between the matrix products: drawing and attention are chains of
    elementwise operations.
    """

    steps_between_checks = STEPS_BETWEEN_CHECKS
    still = True

    def __init__(self, policy: nn.Module, sampling: Sampling, device: torch.device, compiled: bool):
        super().__init__(policy, sampling, device)
        self.device = device
        self.run = torch.compile(super().step, dynamic=True) if compiled else super().step
        self.graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def step(self, state: State, cache: Cache, shape: Shape) -> None:
        shape = rounded(shape, cache)
        if self.device.type != "cuda":
            self.run(state, cache, shape)
            return
        if shape not in self.graphs:
            self.graphs[shape] = self._record(state, cache, shape)
        self.graphs[shape].replay()

    def _record(self, state: State, cache: Cache, shape: Shape) -> torch.cuda.CUDAGraph:
        """Run the step on a side stream until all is set up, take back what that changed, and record it."""
        before = state.copy()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.run(state, cache, shape)
                state.become(before)  # keys and values that were written ahead are written again in their turn
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.graphs.values()), None)  # they never run at the same time
        with torch.cuda.graph(graph, pool=pool):  # pyright: ignore[reportArgumentType]
            self.run(state, cache, shape)
        state.become(before)  # recording does not compute; drawn tokens come with the first replay
        log.debug("the engine recorded a step of %s", shape)
        return graph


def rounded(shape: Shape, cache: Cache) -> Shape:
    """The shape whose recording serves: all prompt columns and every place of a group."""
    return Shape(
        rows=min(cache.rows, max(FEWEST_ROWS, _power_of_two(shape.rows))),
        groups=min(cache.groups, _power_of_two(shape.groups)),
        members=cache.members,
        prompt_columns=cache.prompt_columns,
        own_columns=min(cache.own_columns, -(-shape.own_columns // COLUMNS) * COLUMNS),
        even_prompts=False,
        even_ages=False,
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
