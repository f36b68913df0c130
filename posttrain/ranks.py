"""The processes that train one model together: what each does, and how they exchange it.

Every rank has the whole model and packs the whole batch; it scores its own packs, and gradients, metrics and
log-probabilities are summed over the ranks. As all denominators are those of the whole step, sums are exact: the number
of ranks changes no gradient but for the order of its terms.

    with joined() as ranks:              # of torchrun's environment; ALONE without it
        mine = ranks.mine(packs)
        ranks.sum_(gradients)
        metrics = ranks.together(lambda: scored(mine))     # what every rank found, or the error of one
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.errors import RankError, is_out_of_memory, reason_of
from posttrain.signals import handling
from posttrain.terminal import say

log = logging.getLogger("posttrain")

T = TypeVar("T")
BUCKET = 1 << 24  # numbers that are summed in one exchange: 64 MB in float32
PATIENCE = timedelta(days=7)  # of exchanges: the first rank may tokenise for hours while others wait
BEAT_S = 1.0  # between two heartbeats
SILENCE_S = 30.0  # without one, a rank counts as lost


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, numbered from 0; the first one writes the run folder. Of one process, every method is the
    identity."""

    index: int = 0
    size: int = 1
    local: int = 0  # number on this machine
    locals: int = 1  # ranks on this machine
    in_step: bool = False  # whether a pass over the model is a collective operation, of which all make as many
    _watch: Watch | None = field(default=None, repr=False, compare=False)
    _objects: Any = field(default=None, repr=False, compare=False)  # the group that exchanges objects

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's items, every `size`-th one."""
        return items if self.size == 1 else items[self.index :: self.size]

    def keeping_step(self, in_step: bool) -> Ranks:
        """The ranks of a run whose passes over the model are collective operations, or are not."""
        if self._watch is not None:
            self._watch.in_step = in_step
        return replace(self, in_step=in_step and self.size > 1)

    @contextmanager
    def naming_lost(self) -> Iterator[None]:
        """Context in which the failure of a collective pass is a RankError, if a rank is lost."""
        try:
            yield
        except RuntimeError as error:
            watch = self._watch
            if watch is None or not watch.in_step or is_out_of_memory(error):
                raise
            with handling(lambda number, frame: None, signal.SIGTERM):  # of the launcher, which has noticed too
                lost = watch.lost(error)
            if lost:
                raise RankError(lost) from error
            raise

    def spare(self, items: Sequence[T]) -> Sequence[T]:
        """What this rank goes through besides `mine`, without effect, where all ranks must make as many passes."""
        if not self.in_step or not items:
            return ()
        return [items[0]] * (-(-len(items) // self.size) - len(self.mine(items)))

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Raises RankError if a rank is lost."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._exchange():
            dist.all_gather_object(found, value, group=self._objects)
        return found

    def passes(self, work: Callable[[], T]) -> list[T]:
        """As `together`, of work that makes passes over the model: where these are collective, the others cannot wait
        for an error of one rank, which then is lost."""
        return self.gather(work()) if self.in_step else self.together(work)

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on every rank. An error on one of them is raised there, and a RankError on the others."""
        if self.size == 1:
            return [work()]
        failed: Exception | None = None
        value: T | None = None
        try:
            value = work()
        except RankError:
            raise
        except Exception as error:
            failed = error
        found = self.gather((value, None if failed is None else reason_of(failed)))
        assert self._watch is not None
        self._watch.ended_together = any(reason is not None for _, reason in found)
        if failed is not None:
            raise failed
        for rank, (_, reason) in enumerate(found):
            if reason is not None:
                raise RankError(f"rank {rank} failed: {reason}")
        return [one for one, _ in found]  # pyright: ignore[reportReturnType]

    @property
    def ended_together(self) -> bool:
        """Whether all ranks leave what they do at the same place: one of them failed, and the others know it."""
        return self._watch is not None and self._watch.ended_together

    def any(self, flag: bool) -> bool:
        return flag if self.size == 1 else any(self.gather(flag))

    def first(self, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank, which alone does it."""
        return self.together(lambda: work() if self.is_first else None)[0]  # pyright: ignore[reportReturnType]

    @contextmanager
    def ahead(self, of_machine: bool = False) -> Iterator[None]:
        """A block that the first rank, or the first of each machine, leaves before the others enter it: it fills caches
        that they read."""
        first = self.local == 0 if of_machine else self.is_first
        if not first:
            self.gather(None)
        yield
        if first:
            self.gather(None)

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype and device by their sums over the ranks; the same bits on every rank."""
        if self.size == 1 or not tensors:
            return
        some: list[Tensor] = []
        for number, tensor in enumerate(tensors):
            some.append(tensor)
            last = number + 1 == len(tensors)
            if last or sum(one.numel() for one in some) + tensors[number + 1].numel() > BUCKET:
                self._sum(some)
                some = []

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of parameters; one without a gradient on this rank but on another counts as 0."""
        if self.size == 1:
            return
        there = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8)
        with self._exchange():
            dist.all_reduce(there, dist.ReduceOp.MAX, group=self._objects)
        trained = [one for one, has in zip(parameters, there.tolist(), strict=True) if has]
        for one in trained:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        self.sum_([one.grad for one in trained if one.grad is not None])

    def spread(
        self, items: Sequence[T], shapes: Sequence[Sequence[int]], of: Callable[[T], Tensor], device: torch.device
    ) -> list[Tensor]:
        """`of` of every item, float32 tensors of these shapes on this device, each computed by one rank."""
        if self.size == 1:
            return [of(item) for item in items]
        own = range(self.index, len(items), self.size)
        made = [torch.zeros(*shape, device=device) for shape in shapes]
        for place in own:
            made[place] = of(items[place]).detach().float()
        for item in self.spare(items):
            of(item)
        self.sum_(made)
        return made

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) == 1 and tensors[0].is_contiguous():
            self._all_reduce(tensors[0])
            return
        flat = torch.cat([one.reshape(-1) for one in tensors])
        self._all_reduce(flat)
        for one, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
            one.copy_(part.view(one.shape))

    def _all_reduce(self, tensor: Tensor) -> None:
        with self._exchange():
            dist.all_reduce(tensor)

    def on_lost(self, end: Callable[[BaseException], None]) -> None:
        """Call `end(error)` before this process ends because another one is lost while the main thread waits for it."""
        if self._watch is not None:
            self._watch.on_lost = end

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        assert self._watch is not None
        self._watch.enter()
        try:
            yield
        except RuntimeError as error:  # a closed connection, or a timeout
            raise RankError(self._watch.blame(error)) from error
        finally:
            self._watch.waits = False


ALONE = Ranks()


class Watch(threading.Thread):
    """Tells the other ranks that this one lives, and ends the process when another one does not.

    The first rank looks at all others, these at the first. A rank that is lost is usually noticed earlier, by the
    exchange that it misses; one that hangs holds the exchange up, and the main thread with it.
    """

    def __init__(self, store: dist.Store, index: int, size: int):
        super().__init__(name="posttrain-ranks", daemon=True)
        self._store, self._index, self._size = store, index, size
        self._others = [rank for rank in range(size) if rank != index] if index == 0 else [0]
        self._seen: dict[int, tuple[str, float]] = {}  # the last heartbeat, and when it came
        self.ended_together = False
        self.in_step = False  # exchanges are part of every pass: no rank can go on without the others
        self.count, self.waits = 0, False  # exchanges so far; whether the main thread is in one
        self.on_lost: Callable[[BaseException], None] = lambda error: None
        self._ended = threading.Event()
        self._beat()

    def run(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._beat()
                lost = self._silent(SILENCE_S)
            except RuntimeError as error:  # the store went with its process
                lost = [0]
                log.debug("the store of the ranks does not answer: %s", error)
            if lost and (self.waits or self.in_step):
                self._give_up(RankError(self._named(lost)))

    def enter(self) -> None:
        """The main thread waits for the others now."""
        self.count, self.waits = self.count + 1, True

    def end(self) -> None:
        self._ended.set()

    def blame(self, error: BaseException) -> str:
        """Which rank is lost, once its heartbeats stop."""
        if lost := self.lost(error):
            return lost
        try:
            beats = self._beats(range(self._size))
        except RuntimeError:
            return self._named([0])
        counts = {rank: int(beat.split()[2]) for rank, beat in beats.items()}
        behind = [f"rank {rank}" for rank, count in counts.items() if count < max(counts.values())]
        first = " ".join(str(error).split())[:200]
        return f"the ranks do not exchange data any more; behind: {', '.join(behind) or 'none'} ({first})"

    def lost(self, error: BaseException) -> str | None:
        """The ranks whose heartbeats stop after this error, in words."""
        log.debug("an exchange between ranks failed: %s", error)
        self.waits = self.in_step = False  # the main thread ends the run itself
        try:
            self._silent(0)
            time.sleep(3 * BEAT_S)
            lost = self._silent(2 * BEAT_S)
        except RuntimeError:
            lost = [0]
        return self._named(lost) if lost else None

    def _give_up(self, error: RankError) -> None:
        """End the process, unless the main thread notices by itself, or waits no more."""
        before = self.count
        self._ended.wait(5 * BEAT_S)
        if self._ended.is_set() or not (self.in_step or (self.waits and self.count == before)):
            return
        try:
            self.on_lost(error)
        finally:
            say(f"error: {error}", error=True)
            os._exit(1)

    def _named(self, ranks: Sequence[int]) -> str:
        names = []
        for rank in ranks:
            beat = self._seen.get(rank)
            names.append(f"rank {rank}" + (f" on {beat[0].split()[1]}" if beat else ""))
        lost = "is lost: its process has ended, or is stopped" if len(names) == 1 else "are lost"
        return f"{', '.join(names)} {lost}"

    def _silent(self, seconds: float) -> list[int]:
        """The ranks without a heartbeat for this long."""
        now = time.monotonic()
        for rank, beat in self._beats(self._others).items():
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now
        return [rank for rank, (_, since) in self._seen.items() if now - since > seconds]

    def _beat(self) -> None:
        self._store.set(f"posttrain/{self._index}", f"{time.time():.3f} {socket.gethostname()} {self.count}")

    def _beats(self, ranks: Iterable[int]) -> dict[int, str]:
        return {rank: self._store.get(f"posttrain/{rank}").decode() for rank in ranks}


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun or `accelerate launch` started, connected inside the block; ALONE without them."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    index, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        watch = Watch(_own_connection(), index, size)
        objects = dist.new_group(timeout=PATIENCE, backend="gloo")
        watch.start()
        yield Ranks(index, size, local, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _watch=watch, _objects=objects)
        watch.end()
    finally:
        dist.destroy_process_group()


def _own_connection() -> dist.Store:
    """A connection to the ranks' store for another thread: one that waits in a connection holds it up."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store
