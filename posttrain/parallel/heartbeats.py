"""Heartbeats between the ranks of a run, separate from their exchanges: which ranks are alive, and where each waits.

Each rank writes a line to a shared store every second. The first rank reads every line; the other ranks read only the
first rank's line. A rank that dies is usually noticed earlier, because an exchange fails. A rank that hangs blocks the
exchange and the main threads of all other ranks; so do two ranks that wait for each other in different exchanges.
"""

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Self

from posttrain.base.errors import RankError
from posttrain.base.log import log
from posttrain.base.terminal import say

if TYPE_CHECKING:
    from torch.distributed import Store  # builds of torch without it train in one process

BEAT_S = 1.0  # seconds between two heartbeats
SILENCE_S = 30.0  # seconds without a heartbeat until a rank is lost; in different exchanges until ranks are out of step


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's progress: the number of exchanges it has entered, the one it is waiting in, and its training step."""

    exchanges: int = 0
    kind: str = ""  # kind of the exchange that the rank is waiting in; empty outside an exchange
    step: int = 0


@dataclass(slots=True)
class Beat:
    """The last heartbeat of a rank."""

    line: str
    heard: float
    position: Position
    since: float  # when the rank reached this position
    host: str


class RankWatch:
    """Inside its context, reports to the other ranks that this rank is alive; ends the process if a rank is lost or out
    of step. `store` is hosted by the launcher or the first rank.

    One thread talks to the store, whose process may hang; a second thread judges the heartbeats that the first reads.
    """

    def __init__(self, store: "Store", index: int, size: int):
        self._store, self._index = store, index
        self._others = [rank for rank in range(size) if rank != index] if index == 0 else [0]
        self._heard = time.monotonic()  # the last time that the store answered
        self._beats = {rank: Beat("", self._heard, Position(), self._heard, "") for rank in self._others}
        self.ended_together = False
        self.reported: Exception | None = None  # this rank's error, once the other ranks know it
        self.in_step = False  # every pass over the model includes exchanges: no rank can continue without the others
        self.position, self._since = Position(), self._heard
        self.on_lost: Callable[[BaseException], None] = lambda error: None
        self._threads: list[threading.Thread] = []
        self._ended, self._handled = threading.Event(), threading.Event()
        self._set()

    def __enter__(self) -> Self:
        for work in (self._talk, self._judge):
            self._threads.append(threading.Thread(target=work, name=f"posttrain-ranks{work.__name__}", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop watching. A thread that is still in the store's code at interpreter exit would abort the process."""
        self._handled.set()
        self._ended.set()
        for thread in self._threads:
            thread.join(2 * BEAT_S)  # a store that hangs must not delay the exit

    def enter(self, kind: str) -> None:
        """Record that the main thread starts to wait for the other ranks."""
        self._move(replace(self.position, exchanges=self.position.exchanges + 1, kind=kind))

    def leave(self) -> None:
        self._move(replace(self.position, kind=""))

    def at_step(self, step: int) -> None:
        """Record that the main thread starts a training step."""
        self._move(replace(self.position, step=step))

    def _move(self, position: Position) -> None:
        self.position, self._since = position, time.monotonic()

    # Messages

    def blame(self, error: BaseException) -> str:
        """Wait 5 s to see whose heartbeats stop. Return a message that names the lost ranks, or else those behind."""
        if lost := self.lost(error):
            return lost
        here = self.position.exchanges
        behind = [f"rank {rank}" for rank, beat in self._beats.items() if beat.position.exchanges < here]
        first = " ".join(str(error).split())[:200]
        return f"the ranks can no longer exchange data; ranks behind: {', '.join(behind) or 'none'} ({first})"

    def lost(self, error: BaseException) -> str | None:
        """A message that names the ranks whose heartbeats stop after this error; None if all continue."""
        log.debug("an exchange between ranks failed: %s", error)
        self._handled.set()  # the main thread now ends the run itself
        self.in_step = False
        self.leave()
        since = time.monotonic()
        time.sleep(5 * BEAT_S)
        lost = [rank for rank, beat in list(self._beats.items()) if beat.heard < since + 2 * BEAT_S]
        if self._heard < since + 2 * BEAT_S:
            lost = [0]
        return self._named(lost) if lost else None

    def _named(self, ranks: Sequence[int]) -> str:
        names = [self._name(rank) for rank in ranks]
        if ranks == [self._index]:  # the store is gone, and this process is alive: the launcher hosted it
            return "the launcher of the first rank is lost: its process has ended, or is stopped"
        lost = "is lost: its process has ended, or is stopped" if len(names) == 1 else "are lost"
        return f"{', '.join(names)} {lost}"

    def _name(self, rank: int) -> str:
        if rank == self._index:
            return f"rank {rank} on {socket.gethostname()}"
        host = self._beats[rank].host if rank in self._beats else ""
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def _out_of_step(self) -> str | None:
        """A message that names the ranks that have waited too long in a different exchange; None if there are none."""
        here, now = self.position, time.monotonic()
        if not here.kind or now - self._since < SILENCE_S:
            return None
        apart = {
            self._name(rank): beat.position
            for rank, beat in list(self._beats.items())
            if beat.position.kind and now - beat.since > SILENCE_S and beat.position != here
        }
        return out_of_step({self._name(self._index): here, **apart}) if apart else None

    # The threads

    def _talk(self) -> None:
        try:
            while not self._ended.wait(BEAT_S):
                self._set()
                for key, rank in ((f"posttrain/{rank}", rank) for rank in self._others):
                    if self._store.check([key]):  # `get` would wait for a missing key
                        self._note(rank, self._store.get(key).decode())
                self._heard = time.monotonic()
        except RuntimeError as error:  # the store's process has ended
            log.debug("the ranks' store does not answer: %s", error)
            self._heard = -math.inf

    def _set(self) -> None:
        beat = [time.time(), socket.gethostname(), *astuple(self.position)]
        self._store.set(f"posttrain/{self._index}", json.dumps(beat))

    def _note(self, rank: int, line: str) -> None:
        now, before = time.monotonic(), self._beats[rank]
        if before.line == line:
            return
        _, host, *fields = json.loads(line)
        position = Position(*fields)
        self._beats[rank] = Beat(line, now, position, before.since if before.position == position else now, host)

    def _judge(self) -> None:
        last = time.monotonic()
        while not self._handled.wait(BEAT_S):
            now = time.monotonic()
            if now - last > SILENCE_S / 2:  # this process itself was suspended: restart the silence counts
                self._since, self._heard = now, max(self._heard, now) if math.isfinite(self._heard) else self._heard
                for beat in list(self._beats.values()):
                    beat.heard = beat.since = now
            last = now
            lost = [rank for rank, beat in list(self._beats.items()) if now - beat.heard > SILENCE_S]
            if gone := now - self._heard > SILENCE_S:
                lost = [0]
            if lost and (self.position.kind or self.in_step):
                self._give_up(RankError(self._named(lost)))
            elif apart := self._out_of_step():
                self._give_up(RankError(apart))
            elif gone:  # the exchanges continue: the launcher has died, and nothing else would end the ranks
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _give_up(self, error: RankError) -> None:
        """End the process, unless the main thread notices the error itself or no longer waits."""
        before = self.position.exchanges
        self._ended.wait(5 * BEAT_S)
        if self._ended.is_set() or not (self.in_step or (self.position.kind and self.position.exchanges == before)):
            return
        try:
            self.on_lost(error)
        finally:
            say(f"error: {error}", error=True)
            os._exit(1)


def out_of_step(positions: dict[str, Position]) -> str:
    """An error message about ranks at different positions, given by name."""
    at = [f"{name} is at step {rank.step}, exchange {rank.exchanges} ({rank.kind})" for name, rank in positions.items()]
    return (
        f"the ranks are out of step: {'; '.join(at)}. Your own code that runs on every rank, such as a reward, must "
        "either return on all ranks or raise on all ranks; if you have no such code, please report this"
    )
