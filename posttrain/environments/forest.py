"""Episodes of a start that branch from others (Tree-GRPO, arXiv 2509.21240): which do, and when they begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Lock

import numpy as np

from posttrain.engines.turns import Turn
from posttrain.environments.episode import Episode, Trunk


@dataclass(frozen=True, slots=True)
class Forest:
    """How the episodes of a start branch: the first `trees` begin anew. The others branch from turns of these, an
    equal number in each of `rounds`; those of a later round may also branch from earlier branches."""

    trees: int
    rounds: int = 1

    def rounds_of(self, tree: int, n: int) -> list[list[int]]:
        """The numbers of a tree's episodes by round, of `n` in all; the first round has the one that begins anew."""
        branches = np.arange(tree + self.trees, n, self.trees)
        return [[tree], *(part.tolist() for part in np.array_split(branches, self.rounds) if len(part))]


class Growth:
    """Begins the episodes of a run: those that begin anew at once, branches when the round before them is over.

    `begun` are the futures of their first turns. `begin` starts an episode; `repeat` gives a branch its shared turns.
    """

    def __init__(
        self,
        episodes: Sequence[Episode],
        n: int,
        forest: Forest | None,
        begin: Callable[[Episode], Future[Turn | None]],
        repeat: Callable[[Episode, Trunk], Future[Turn | None]],
    ):
        self.episodes, self.n, self.begin, self.repeat = episodes, n, begin, repeat
        trees = n if forest is None else forest.trees
        self.begun = [Future[Turn | None]() for _ in episodes]
        self._lock, self._started = Lock(), list[Future[Turn | None]]()
        self._rounds: dict[int, list[list[int]]] = {}  # of each tree, by the index of its first episode
        for first in range(0, len(episodes), n):
            for tree in range(min(trees, n)):
                rounds = [[tree]] if forest is None else forest.rounds_of(tree, n)
                self._rounds[first + tree] = [[first + number for number in part] for part in rounds]
                for number in chain(*rounds):
                    episodes[first + number].root = first + tree
                    episodes[first + number].trajectory.tree = None if forest is None else tree
        self._live = {root: 1 for root in self._rounds}  # episodes of the current round that are not over

    def plant(self) -> None:
        """Start the episodes that begin anew."""
        for root in self._rounds:
            self._start(root)

    def stop(self) -> None:
        for future in (*self._started, *self.begun):
            future.cancel()

    def answered(self, index: int, future: Future[Turn | None]) -> None:
        """Called when it is known what follows in an episode. If this is nothing, branches may begin."""
        if future.cancelled() or future.exception() is not None or future.result() is not None:
            return
        try:
            self._grow(self.episodes[index].root)
        except BaseException as error:  # a callback's error would be lost, and the run would wait for these futures
            for each in self.begun:
                if not each.done():
                    each.set_exception(error)
            raise

    def _grow(self, root: int) -> None:
        """Note that an episode of a tree is over; start those of the next round if it was the last one."""
        with self._lock:
            self._live[root] -= 1
            if self._live[root] or len(self._rounds[root]) == 1:
                return
            grown, following = self._rounds[root][:2]
            self._rounds[root][:2] = [[*grown, *following]]
            self._live[root] = len(following)
        nodes = [(trunk, replies) for trunk in grown for replies in self.episodes[trunk].inner]
        order = np.random.default_rng([self.episodes[root].seed, len(grown)]).permutation(len(nodes))
        for position, branch in enumerate(following):
            if nodes:
                trunk, replies = nodes[order[position % len(nodes)]]
                self.episodes[branch].trunk = Trunk(trunk, self.episodes[trunk].trajectory, replies)
                self.episodes[branch].trajectory.trunk = trunk % self.n
            self._start(branch)

    def _start(self, index: int) -> None:
        if self.begun[index].set_running_or_notify_cancel():
            self._started.append(started := self.begin(self.episodes[index]))
            started.add_done_callback(partial(self._has_begun, index))

    def _has_begun(self, index: int, future: Future[Turn | None]) -> None:
        if future.cancelled():
            return
        episode = self.episodes[index]
        if (error := future.exception()) is not None:
            self.begun[index].set_exception(error)
        elif future.result() is not None and episode.trunk is not None and not episode.trajectory.shared:
            self._started.append(repeated := self.repeat(episode, episode.trunk))
            repeated.add_done_callback(partial(self._has_begun, index))
        else:
            self.begun[index].set_result(future.result())
            self.answered(index, future)
