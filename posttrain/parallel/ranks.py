"""The processes that train one model together: how they share the work and exchange results.

Every rank holds the whole model, or its rows of every tensor (models/sharding.py), and packs the whole batch. It scores
only its own packs; gradients, metrics and log-probabilities are summed over the ranks. All denominators are those of
the whole step, so the sums are exact: the number of ranks only changes the order in which a gradient's terms are added.

    with joined() as ranks:              # from torchrun's environment; ALONE without it
        mine = ranks.mine(packs)
        ranks.sum_(gradients)
        metrics = ranks.together(lambda: scored(mine))     # every rank's result, or the error of one

Between ranks on one machine, gloo sends every number through the loopback interface. Ranks on the CPU of one machine
sum in shared memory instead (`SharedSums`): each rank writes its numbers where all can read them, sums one part, and
writes the sums for the others.
"""

import hashlib
import itertools
import json
import mmap
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.base.errors import RankError, is_out_of_memory, reason_of
from posttrain.base.signals import handling
from posttrain.base.words import by_key
from posttrain.parallel.heartbeats import Position, RankWatch, out_of_step
from posttrain.parallel.rendezvous import choose_network, connected, in_time, meeting

T = TypeVar("T")
CONNECT_S = 120.0  # seconds in which ranks that have all started must connect
PATIENCE = timedelta(days=7)  # timeout of exchanges: the first rank may tokenise for hours while others wait
MOST_LISTED, LONGEST_SHOWN = 20, 120  # maximum differences in a message, and characters of each value
ROOM = 1 << 25  # maximum bytes of one exchange
LEAST_SHARED = 1 << 16  # minimum numbers to sum in shared memory: its two barriers take longer than a small exchange


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, from 0; the first one writes the run folder. With one process, methods return their input."""

    index: int = 0
    size: int = 1
    local: int = 0  # this rank's number on its machine
    locals: int = 1  # number of ranks on this machine
    in_step: bool = False  # whether a pass over the model is a collective operation, which all ranks call equally often
    _watch: RankWatch | None = field(default=None, repr=False, compare=False)
    _objects: Any = field(default=None, repr=False, compare=False)  # the process group for objects
    _memory: "SharedSums | None" = field(default=None, repr=False, compare=False)  # if all ranks use one machine's CPU

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's items: every `size`-th item, from `index` on."""
        return items if self.size == 1 else items[self.index :: self.size]

    def keeping_step(self, in_step: bool) -> Self:
        """Copy these ranks with `in_step`: whether passes over the model are collective operations."""
        if self._watch is not None:
            self._watch.in_step = in_step
        return replace(self, in_step=in_step and self.size > 1)

    @contextmanager
    def naming_lost(self) -> Iterator[None]:
        """Context that turns the failure of a collective pass into a RankError if a rank is lost."""
        try:
            yield
        except RuntimeError as error:
            watch = self._watch
            if watch is None or not watch.in_step or is_out_of_memory(error):
                raise
            with handling(lambda number, frame: None, signal.SIGTERM):  # the launcher sends it when a rank has ended
                lost = watch.lost(error)
            if lost:
                raise RankError(lost) from error
            raise

    def spare(self, items: Sequence[T]) -> Sequence[T]:
        """Extra items that give all ranks equally many passes, if passes are collective. Their results are ignored."""
        if not self.in_step or not items:
            return ()
        return [items[0]] * (-(-len(items) // self.size) - len(self.mine(items)))

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Raises RankError if a rank is lost, or is at a different step or exchange."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self._exchange("objects") as here:
            dist.all_gather_object(gathered, (here, value), group=self._objects)
        if any(position != here for position, _ in gathered):
            raise RankError(out_of_step({f"rank {rank}": position for rank, (position, _) in enumerate(gathered)}))
        return [value for _, value in gathered]

    def at_step(self, step: int) -> None:
        """Record that this rank starts a training step."""
        if self._watch is not None:
            self._watch.at_step(step)

    def differences(self, facts: Mapping[str, Any]) -> list[str]:
        """One line for each fact that differs between ranks, with its values by rank; every rank returns the same
        lines. Only digests are exchanged, unless they differ."""
        text = json.dumps(facts, sort_keys=True, default=str)
        digests = self.gather(hashlib.sha256(text.encode(errors="surrogatepass")).digest())
        if len(set(digests)) == 1:
            return []
        lines = list(_differences(self.gather((socket.gethostname(), json.loads(text)))))
        more = [f"and {len(lines) - MOST_LISTED:,} more"] if len(lines) > MOST_LISTED else []
        return lines[:MOST_LISTED] + more

    def passes(self, work: Callable[[], T]) -> list[T]:
        """Like `together`, for work that makes passes over the model. If passes are collective, the other ranks cannot
        wait for the error of a failed rank; it is reported as lost."""
        return self.gather(work()) if self.in_step else self.together(work)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Every rank's result of `work`. An error on one rank is raised there, and as a RankError on the other ranks.

        `work` may itself call `together`, if it does so on every rank.
        """
        if self.size == 1:
            return [work()]
        failed: Exception | None = None
        value: T | None = None
        try:
            value = work()
        except RankError:
            raise
        except Exception as error:
            if self._watch is not None and self._watch.reported is error:  # by a `together` inside this one
                raise
            failed = error
        outcomes = self.gather((value, None if failed is None else reason_of(failed)))
        assert self._watch is not None
        self._watch.reported = failed
        self._watch.ended_together = any(reason is not None for _, reason in outcomes)
        if failed is not None:
            raise failed
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise RankError(f"rank {rank} failed: {reason}")
        return [result for result, _ in outcomes]  # pyright: ignore[reportReturnType]

    @property
    def ended_together(self) -> bool:
        """Whether all ranks stopped because one reported an error."""
        return self._watch is not None and self._watch.ended_together

    def first(self, work: Callable[[], T]) -> T:
        """The result of `work`, which only the first rank runs."""
        return self.together(lambda: work() if self.is_first else None)[0]  # pyright: ignore[reportReturnType]

    @contextmanager
    def ahead(self, of_machine: bool = False) -> Iterator[None]:
        """Let the first rank (`of_machine`: the first of each machine) finish the block, which fills caches, before the
        other ranks enter it."""
        first = self.local == 0 if of_machine else self.is_first
        if not first:
            self.gather(None)
        yield
        if first:
            self.gather(None)

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype and device by their sums over the ranks, bit for bit the same on every rank."""
        if self.size == 1 or not tensors:
            return
        whole = [tensor.contiguous() for tensor in tensors]
        for pieces in _exchanges([tensor.view(-1) for tensor in whole]):
            with self._exchange("sums"):
                self._sum(pieces)
        for tensor, total in zip(tensors, whole, strict=True):
            if total is not tensor:
                tensor.copy_(total)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of parameters over the ranks. A gradient that only other ranks have counts as 0 here."""
        if self.size == 1:
            return
        has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        with self._exchange("gradients"):
            dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self._objects)
        gradients = []
        for parameter in itertools.compress(parameters, has_gradient.tolist()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.sum_(gradients)

    def spread(
        self, items: Sequence[T], shapes: Sequence[Sequence[int]], of: Callable[[T], Tensor], device: torch.device
    ) -> list[Tensor]:
        """The results of `of` for all items, each computed by one rank: float32 tensors of these shapes on `device`."""
        if self.size == 1:
            return [of(item) for item in items]
        results = [torch.zeros(*shape, device=device) for shape in shapes]
        for number in range(self.index, len(items), self.size):
            results[number] = of(items[number]).detach().float()
        for item in self.spare(items):
            of(item)
        self.sum_(results)
        return results

    def _sum(self, pieces: Sequence[Tensor]) -> None:
        """Sum flat tensors that together fit into one exchange."""
        if self._memory is not None and sum(piece.numel() for piece in pieces) >= LEAST_SHARED:
            self._memory.sum_(pieces)
            return
        if len(pieces) == 1:
            dist.all_reduce(pieces[0])
            return
        flat = torch.cat(list(pieces))
        dist.all_reduce(flat)
        for piece, total in zip(pieces, flat.split([piece.numel() for piece in pieces]), strict=True):
            piece.copy_(total)

    def on_lost(self, end: Callable[[BaseException], None]) -> None:
        """Call `end(error)` before this process ends because the main thread waits for a rank that is lost."""
        if self._watch is not None:
            self._watch.on_lost = end

    @contextmanager
    def _exchange(self, kind: str) -> Iterator[Position]:
        assert self._watch is not None
        self._watch.enter(kind)
        try:
            yield self._watch.position
        except RuntimeError as error:  # a closed connection, or a timeout
            raise RankError(self._watch.blame(error)) from error
        finally:
            self._watch.leave()


ALONE = Ranks()


def _exchanges(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group flat tensors of one dtype into exchanges of at most ROOM bytes; longer tensors are split."""
    room = ROOM // tensors[0].element_size()
    group: list[Tensor] = []
    for part in (part for tensor in tensors for part in tensor.split(room)):
        if group and sum(piece.numel() for piece in group) + part.numel() > room:
            yield group
            group = []
        group.append(part)
    yield group


def _differences(each: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A line for each fact that differs; `each` has the host and the facts of every rank."""
    for name in sorted({name for _, facts in each for name in facts}):
        values = [_shown(facts[name]) if name in facts else "nothing" for _, facts in each]
        ranks_by_value = by_key((value, rank) for rank, value in enumerate(values))
        if len(ranks_by_value) > 1:
            first, *others = ranks_by_value.items()
            yield f"{name}: " + "; ".join(f"{_having(ranks, each)} {value}" for value, ranks in [*others, first])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[:LONGEST_SHOWN]}… ({hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]})"


def _having(ranks: Sequence[int], each: Sequence[tuple[str, Any]]) -> str:
    """The subject and verb of a difference: `ranks 0, 1 on node-a have`."""
    hosts = ", ".join(dict.fromkeys(each[rank][0] for rank in ranks))
    names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{names} on {hosts} {'has' if len(ranks) == 1 else 'have'}"


@contextmanager
def joined() -> Iterator[Ranks]:
    """Connect the ranks that torchrun or `accelerate launch` started, for the block; yields ALONE if there are none.
    Raises RankError if the ranks do not find one another in time, or were started with different numbers of ranks."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield ALONE
        return
    index, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here < size:
        choose_network()
    try:
        with ExitStack() as stack:
            with meeting(index, size) as store:
                # The watch's thread has its own connection: a waiting thread blocks the connection that it uses.
                watch = stack.enter_context(RankWatch(connected(index, as_client=True), index, size))
                objects = _connect(store, watch, index, size)
            ranks = Ranks(index, size, local, here, _watch=watch, _objects=objects)
            if here == size and not torch.cuda.is_available():
                ranks = replace(ranks, _memory=shared_sums(index, dist.barrier, ranks.gather))
            yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(store: dist.Store, watch: RankWatch, index: int, size: int) -> Any:
    """Connect the ranks for tensors on their devices. Returns the process group for objects, with its own timeout."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or "that of the address to which the host name resolves"
    failed = f"rank {index} on {socket.gethostname()} cannot connect to the other ranks"
    advice = (
        "another rank has ended, or not all ports are open between the machines; GLOO_SOCKET_IFNAME names the network "
        f"interface to use (now {interface})"
    )
    watch.enter("connect")
    try:
        with in_time(f"{failed} {{}}: {advice}", CONNECT_S):
            dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=index, world_size=size)
            objects = dist.new_group(timeout=PATIENCE, backend="gloo")
    except RuntimeError as error:
        raise RankError(f"{failed} ({reason_of(error)}): {advice}") from error
    finally:
        watch.leave()
    return objects


class SharedSums:
    """Sums in shared memory: `rooms` has each rank's memory, mapped by all. `meet()` waits until all have called it."""

    def __init__(self, index: int, rooms: Sequence[Tensor], meet: Callable[[], object]):
        self._index, self._meet, self._turn = index, meet, 0
        self._halves = [room.view(2, ROOM) for room in rooms]

    def sum_(self, pieces: Sequence[Tensor]) -> None:
        """Replace flat tensors of one dtype, together at most ROOM bytes, by sums that are bit for bit the same on all
        ranks. The two halves of the memory alternate, so all ranks meet between a half's last read and its next write.
        """
        lengths, dtype, self._turn = [piece.numel() for piece in pieces], pieces[0].dtype, 1 - self._turn
        each = [halves[self._turn].view(dtype)[: sum(lengths)] for halves in self._halves]
        torch.cat(list(pieces), out=each[self._index])
        self._meet()
        parts = [half.tensor_split(len(each))[self._index] for half in each]  # the part that this rank sums
        own, *others = parts[self._index :] + parts[: self._index]
        for other in others:
            own.add_(other)
        for other in others:
            other.copy_(own)
        self._meet()
        for piece, total in zip(pieces, each[self._index].split(lengths), strict=True):
            piece.copy_(total)


def shared_sums(index: int, meet: Callable[[], object], gather: Callable[[Any], Sequence[Any]]) -> SharedSums | None:
    """The SharedSums of rank `index`; None if the ranks cannot map one another's memory. Every rank must call this.

    `gather` returns the arguments of all ranks. The memory has no name in a file system, so nothing of it remains,
    however the processes end.
    """
    name = uuid.uuid4().bytes
    try:
        file = os.memfd_create("posttrain-sums")
    except (AttributeError, OSError):  # not Linux, or a system that forbids it
        file = None
    if file is not None:
        os.truncate(file, 2 * ROOM)
        os.pwrite(file, name, 0)
    try:
        rooms = [_mapped(path, name) for path, name in gather((f"/proc/{os.getpid()}/fd/{file}", name))]
        seen = all(gather(all(room is not None for room in rooms)))
    finally:
        if file is not None:
            os.close(file)
    return SharedSums(index, [room for room in rooms if room is not None], meet) if seen else None


def _mapped(path: str, name: bytes) -> Tensor | None:
    """Map another rank's memory, which starts with `name`; None if it is not there (on another machine, say)."""
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 2 * ROOM)
    except (OSError, ValueError):
        return None
    return torch.frombuffer(memory, dtype=torch.uint8) if memory[: len(name)] == name else None
