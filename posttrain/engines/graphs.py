"""The step on a GPU: few shapes, compiled once, and recorded as a CUDA graph for each shape.

A step of a small model launches hundreds of kernels, each shorter than its launch. Recorded once, they are replayed by
one call. A recording has fixed addresses and sizes, so the state and the cache keep their memory between calls of
`generate`, and shapes are rounded up: rows to a power of two, columns to some hundreds. Rows beyond the live ones are
computed and discarded.
"""

import logging
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.engines.cache import Cache, Room, in_columns, power_of_two
from posttrain.engines.decode import Shape, State, Stepper
from posttrain.engines.protocol import Sampling
from posttrain.engines.sampling import sample_tokens

log = logging.getLogger("posttrain")

FEWEST_ROWS = 8
STEPS_BETWEEN_CHECKS = 8  # steps between transfers of the finished rows from the GPU; these rows idle
WARM_UPS = 2  # runs before a recording, in which libraries choose kernels and allocate memory


class Recordings:
    """The recorded steps over one policy. All share one pool of memory: they never run at the same time.

    A recording always reads the weights and adapters at the addresses of its time.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[Stepper, Shape], torch.cuda.CUDAGraph] = {}
        self._recorded_with: object = None

    def check(self, policy: nn.Module) -> None:
        """Drop all recordings if weights have moved or other adapters are active."""
        found = recorded_with(policy)
        if found != self._recorded_with:
            self.graphs.clear()
        self._recorded_with = found

    def drop(self, stepper: Stepper) -> None:
        """Drop the recordings of one stepper, whose state is gone."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if key[0] is not stepper}

    @property
    def pool(self):
        return next((graph.pool() for graph in self.graphs.values()), None)


def recorded_with(policy: nn.Module) -> tuple[object, ...]:
    """The policy's facts in a recording, besides its architecture: addresses, and active adapters."""
    tensors = [(t.data_ptr(), t.dtype, t.shape) for t in chain(policy.parameters(), policy.buffers())]
    modules: list[Any] = list(policy.modules())
    adapters = [
        (module.disable_adapters, *module.active_adapters, None, *module.merged_adapters, *module.scaling.items())
        for module in modules
        if hasattr(module, "merged_adapters") and hasattr(module, "scaling")
    ]
    return (*tensors, *adapters)


class StaticStepper(Stepper):
    """A stepper of few shapes over one state and one cache; recorded on a GPU.

    `compiled` lets torch.compile fuse the operations of sampling, which read and write the logits. Sizes are symbolic,
    so one compilation serves every shape. The layers are not compiled: with models/kernels their operations are fused
    already, and compiling 28 of them takes two minutes.
    """

    steps_between_checks = STEPS_BETWEEN_CHECKS
    still = True

    def __init__(
        self, policy: nn.Module, sampling: Sampling, device: torch.device, recordings: Recordings, compiled: bool
    ):
        super().__init__(policy, sampling, device)
        self.recordings = recordings
        if compiled:
            self.sample = torch.compile(_sample_copied, dynamic=True)

    def rounded(self, shape: Shape, room: Room) -> Shape:
        """The shape of the recording: all prompt columns and every slot of a group."""
        return Shape(
            rows=min(room.rows, max(FEWEST_ROWS, power_of_two(shape.rows))),
            groups=min(room.groups, power_of_two(shape.groups)),
            members=room.members,
            prompt_columns=room.prompt_columns,
            own_columns=min(room.own_columns, in_columns(shape.own_columns)),
            even_prompts=False,
            even_ages=False,
        )

    def step(self, state: State, cache: Cache, shape: Shape) -> None:
        if self.device.type != "cuda":
            super().step(state, cache, shape)
            return
        graphs = self.recordings.graphs
        if (self, shape) not in graphs:
            graphs[self, shape] = self._record(state, cache, shape)
        graphs[self, shape].replay()

    def _record(self, state: State, cache: Cache, shape: Shape) -> torch.cuda.CUDAGraph:
        """Run the step on a side stream to warm up, undo its changes, and record it."""
        before = state.copy()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                super().step(state, cache, shape)
                state.become(before)  # keys and values that were written ahead are written again in their turn
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.recordings.pool):  # pyright: ignore[reportArgumentType]
            super().step(state, cache, shape)
        state.become(before)  # recording does not compute; the first replay gives the tokens
        log.debug("the engine recorded a step of %s", shape)
        return graph


def _sample_copied(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """sample_tokens without its writing to `logits`, which a compiler would do at the end."""
    return sample_tokens(logits.clone(), *given)
