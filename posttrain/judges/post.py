"""One HTTP request with a deadline from connecting to the last byte, and the limits on requests per minute.

httpx is not used: its timeouts apply to single reads, so a server that sends a byte now and then never exceeds them,
and no other thread can end its requests. Its asyncio client could do both, but at the end of the loop it waits for name
resolution, however long this takes. Nor is httpx one of the core dependencies.
"""

import base64
import contextlib
import email.utils
import functools
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

MAX_BYTES = 16 << 20  # maximum size of an answer
PERIOD_S = 60.0  # seconds to which the limits apply


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer. `retry_after`: seconds to wait if the server requests it."""

    status: int
    body: bytes
    retry_after: float | None


class Post:
    """A POST request with JSON, through the environment's proxy if there is one. Any thread can end it with `cut`."""

    def __init__(self, url: str, key: str | None):
        parts = urlsplit(url)
        self._secure, self._host = parts.scheme == "https", parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path
        self._headers = {"Content-Type": "application/json", "Connection": "close", "User-Agent": "posttrain"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._socket: socket.socket | None = None
        self._is_cut = False

    def send(self, body: bytes, timeout: float) -> Answer:
        """Send the request and return the answer. Raises TimeoutError after `timeout` seconds, and OSError or
        HTTPException if the connection fails."""
        until = time.monotonic() + timeout
        watch = threading.Timer(timeout, self.cut)  # a socket's own timeout starts again with each byte
        watch.daemon = True
        watch.start()
        connection = self._connection(timeout)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._is_cut:  # `cut` was called while connecting
                raise ConnectionAbortedError("the request was cut off")
            connection.request("POST", self._path, body, self._headers)
            response = connection.getresponse()
            content = response.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise HTTPException(f"the answer is larger than {MAX_BYTES >> 20} MiB")
            if response.length:
                raise HTTPException("the answer is incomplete")
            return Answer(response.status, content, _seconds(response.getheader("Retry-After")))
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= until:
                raise TimeoutError(f"no answer within {timeout:g} s") from error
            raise
        finally:
            watch.cancel()
            connection.close()

    def cut(self) -> None:
        """Abort the request at once: `send` raises."""
        self._is_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _connection(self, timeout: float) -> HTTPConnection:
        proxy = getproxies().get("https" if self._secure else "http")
        if proxy is None or proxy_bypass(self._host):
            return self._to(self._host, self._port, timeout)
        address, login = urlsplit(proxy if "//" in proxy else f"//{proxy}"), {}
        if address.username:
            pair = f"{unquote(address.username)}:{unquote(address.password or '')}"
            login = {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
        connection = self._to(address.hostname or "", address.port or 80, timeout)
        if self._secure:
            connection.set_tunnel(self._host, self._port, login)
        else:
            self._path = f"http://{self._host}:{self._port}{self._path}"
            self._headers |= login
        return connection

    def _to(self, host: str, port: int, timeout: float) -> HTTPConnection:
        if self._secure:
            return HTTPSConnection(host, port, timeout=timeout, context=_certificates())
        return HTTPConnection(host, port, timeout=timeout)


_certificates = functools.cache(ssl.create_default_context)  # reading the certificate authorities takes a while


def _seconds(header: str | None) -> float | None:
    """A Retry-After header: a number of seconds, or a date."""
    if header is None:
        return None
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, float(header))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    return None


@dataclass(slots=True)
class Entry:
    """A request: when it was sent, and its number of tokens, which is an estimate until the answer arrives."""

    when: float
    tokens: int


class Pace:
    """Delays requests so that no period of PERIOD_S seconds exceeds the limits. Threads share one instance."""

    def __init__(self, requests: int | None, tokens: int | None):
        self._requests, self._tokens = requests, tokens
        self._sent: deque[Entry] = deque()
        self._held_until = 0.0
        self._lock = threading.Lock()

    def enter(self, tokens: int, stop: threading.Event) -> Entry | None:
        """Wait until the limits allow a request of about `tokens` tokens; return None once `stop` is set."""
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
        """Delay all requests for some seconds, as the server requests."""
        with self._lock:
            self._held_until = max(self._held_until, time.monotonic() + seconds)

    def _wait(self, now: float, tokens: int) -> float:
        """Seconds until the limits may allow the request; 0 or less if they allow it now."""
        while self._sent and self._sent[0].when <= now - PERIOD_S:
            self._sent.popleft()
        wait = self._held_until - now
        full = self._requests is not None and len(self._sent) >= self._requests
        # A request larger than the whole limit is allowed if it is the only one in the period.
        used = sum(entry.tokens for entry in self._sent) if self._tokens is not None else 0
        full |= self._tokens is not None and bool(self._sent) and used + tokens > self._tokens
        return max(wait, self._sent[0].when + PERIOD_S - now) if full else wait
