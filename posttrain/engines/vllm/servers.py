"""One or several vLLM servers as one host of the engine, for one process or for the ranks of a run.

Each rank sends its own prompts to one server: that of its number modulo the number of servers. Where there are more
servers than ranks, a rank has several, and deals its prompts out to them. A server belongs to the first of its ranks,
which starts it, pushes the weights to it, and replaces it if it dies.

All ranks call the methods together. A server that is lost in the middle is known to all; its owner brings it back,
with the same weights, before the missing completions are requested again.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posttrain.base.errors import EngineError, EngineLostError
from posttrain.config.schema.rollout import VllmConfig
from posttrain.engines.protocol import Request, Sampling
from posttrain.engines.vllm.client import Address, Server, side_by_side
from posttrain.engines.vllm.core import RawCompletion
from posttrain.engines.vllm.weights import Named
from posttrain.parallel.ranks import Ranks

log = logging.getLogger("posttrain")

Key = tuple[int, int]  # of a server: the first rank of its machine (0 for one at a given address), and its number there
Weights = Callable[[], Iterable[Named]]
Ask = Callable[[Sequence[Request], Sampling], list[list[RawCompletion]]]
Prove = Callable[[Ask], None]  # checks the weights of what it can ask


class Servers:
    """The servers of a run, as one rank sees them. `model` is the body of /model (wire.py).

    Raises EngineError if a server is absent at the start, of another version, silent, or lost too often.
    """

    def __init__(self, settings: VllmConfig, model: Mapping[str, Any], ranks: Ranks):
        self._settings, self._model, self._ranks = settings, model, ranks
        given = settings.base_url
        machine = 0 if given else ranks.index - ranks.local
        index, size = (ranks.index, ranks.size) if given else (ranks.local, ranks.locals)
        count = len(given) if given else settings.servers
        self._mine: dict[Key, Server] = {
            (machine, k): Server(settings, given[k] if given else None, settings.gpus[k] if settings.gpus else None)
            for k in range(count)
            if k % size == index % count
        }
        self._owned = {key: server for key, server in self._mine.items() if key[1] % size == index}
        self._mark = ""
        self._weights: Weights = tuple  # of the last `load`, and what proves them
        self._prove: Prove = lambda ask: None
        try:
            self._exchange(lambda: side_by_side([*self._owned.values()], lambda server: server.start(model)))
        except BaseException:
            self.close()
            raise
        at = [server.at for server in self._mine.values()]
        self.vocabulary = min(one.vocabulary for one in at)
        self.positions = min(one.positions for one in at)

    def load(self, mark: str, weights: Weights, prove: Prove) -> None:
        """Push the weights to every server, once, and let `prove` check each."""
        self._mark, self._weights, self._prove = mark, weights, prove
        lost: dict[Key, str] = {}

        def push(server: Server) -> None:
            try:
                self._push(server)
            except EngineLostError as error:
                lost[self._key(server)] = str(error)

        def work() -> dict[Key, str]:
            side_by_side([*self._owned.values()], push)
            return lost

        self._bring_back(self._ranks.together(work))  # with the weights

    def generate(self, mark: str, asked: Sequence[Request], sampling: Sampling) -> list[list[RawCompletion]]:
        """The completions of this rank's requests."""
        keys = [*self._mine]
        groups: list[list[RawCompletion] | None] = [None] * len(asked)

        def work() -> dict[Key, str]:
            lost: dict[Key, str] = {}

            def ask(server: Server) -> None:
                key = self._key(server)
                places = [i for i in range(len(asked)) if groups[i] is None and keys[i % len(keys)] == key]
                if not places:
                    return
                try:
                    found = server.generate(mark, [asked[i] for i in places], sampling)
                except EngineLostError as error:
                    number = sum(len(asked[i].limits) for i in places)
                    lost[key] = f"{error}; {number} completions of {len(places)} prompts were in flight"
                    return
                for i, group in zip(places, found, strict=True):
                    groups[i] = group

            side_by_side([*self._mine.values()], ask)
            return lost

        while self._bring_back(self._ranks.together(work)):
            pass
        return [group for group in groups if group is not None]

    def close(self) -> None:
        for server in self._mine.values():
            server.close()

    def _key(self, server: Server) -> Key:
        return next(key for key, one in self._mine.items() if one is server)

    def _push(self, server: Server) -> None:
        mark = self._mark
        server.load(mark, self._weights)
        self._prove(lambda asked, sampling: server.generate(mark, asked, sampling))

    def _exchange(self, work: Callable[[], None]) -> None:
        """Do the owner's work; then all ranks learn where the servers are."""

        def done() -> dict[Key, Address]:
            work()
            return {key: server.at for key, server in self._owned.items()}

        for found in self._ranks.together(done):
            for key, address in found.items():
                if key in self._mine:
                    self._mine[key].at = address

    def _bring_back(self, lost: Sequence[Mapping[Key, str]]) -> bool:
        """Replace the servers that any rank has lost, and push the weights to them again; whether there were any."""
        reasons = {key: reason for one in lost for key, reason in one.items()}
        if not reasons:
            return False
        mine = [server for key, server in self._owned.items() if key in reasons]
        self._exchange(lambda: side_by_side(mine, lambda server: self._replace(server, reasons[self._key(server)])))
        return True

    def _replace(self, server: Server, reason: str) -> None:
        while True:
            server.deaths += 1
            if server.deaths > self._settings.max_restarts:
                raise EngineError(
                    f"{reason}. It was lost {server.deaths} times, and rollout.vllm.max_restarts is "
                    f"{self._settings.max_restarts}: look into its memory and its log, then continue with --resume"
                )
            how = "it is started again" if server.is_ours else f"waiting {self._settings.timeout:g} s for it to return"
            log.warning("%s: %s, and the missing completions are requested again", reason, how)
            try:
                server.revive(self._model)
                self._push(server)
                log.warning("%s is back, with the weights %s", server.where, self._mark)
                return
            except EngineLostError as error:
                reason = str(error)
