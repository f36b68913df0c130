"""Limits per minute, for requests and for tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

PERIOD_S = 60.0


@dataclass(slots=True)
class Entry:
    """A request: when it was sent, and its tokens, estimated until the answer is there."""

    when: float
    tokens: int


class Pace:
    """Lets requests pass so that no period of PERIOD_S has more than the limits allow. Threads share one."""

    def __init__(self, requests: int | None, tokens: int | None):
        self._requests, self._tokens = requests, tokens
        self._sent: deque[Entry] = deque()
        self._held_until = 0.0
        self._lock = threading.Lock()

    def enter(self, tokens: int, stop: threading.Event) -> Entry | None:
        """Wait for room for a request of about `tokens` tokens; None if `stop` was set meanwhile."""
        while not stop.is_set():
            with self._lock:
                now = time.monotonic()
                wait = self._wait(now, tokens)
                if wait <= 0:
                    self._sent.append(entry := Entry(now, tokens))
                    return entry
            stop.wait(wait)
        return None

    def hold(self, seconds: float) -> None:
        """Let nothing pass for some seconds, as the server asks."""
        with self._lock:
            self._held_until = max(self._held_until, time.monotonic() + seconds)

    def _wait(self, now: float, tokens: int) -> float:
        """Seconds until there may be room: 0 or less if there is room now."""
        while self._sent and self._sent[0].when <= now - PERIOD_S:
            self._sent.popleft()
        wait = self._held_until - now
        full = self._requests is not None and len(self._sent) >= self._requests
        # A request larger than the whole limit passes when it is alone.
        used = sum(entry.tokens for entry in self._sent) if self._tokens is not None else 0
        full |= self._tokens is not None and bool(self._sent) and used + tokens > self._tokens
        return max(wait, self._sent[0].when + PERIOD_S - now) if full else wait
