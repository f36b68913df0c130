"""What every request passes first: its host and origin, the key, the type and size of its body.

A page of another site that is open in a browser can send requests to a server on this machine. It cannot hide its
origin, and without permission it cannot send JSON; a site whose name was pointed at this machine sends its own name as
the host.
"""

import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from posttrain.base.system import is_loopback

MOST_BYTES = 4 << 20
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
OPEN = {"/health"}  # without the key
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{0,5})?", re.ASCII)


def host_name(host: str) -> str:
    """The name in a `Host` header, without its port; empty if the header is anything else."""
    found = HOST.fullmatch(host)
    return "" if found is None else found[1].strip("[]").lower()


def ambiguous(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Why the site of a request is not clear: two values of a header that names one, or a host that is no name."""
    for name in (b"host", b"origin"):
        if sum(one.lower() == name for one, _ in headers) > 1:
            return f"the request has two headers {name.decode()}"
    host = next((value.decode("latin-1") for one, value in headers if one.lower() == b"host"), "")
    return f"{host!r} is no host name" if host and not host_name(host) else None


def is_foreign(origin: str | None, host: str) -> bool:
    """Whether a request comes from a page of another site, by its headers `Origin` and `Host`."""
    try:
        return origin is not None and urlsplit(origin).netloc != host
    except ValueError:
        return True


class Guard:
    """ASGI middleware. Without a key only requests to a loopback host are taken."""

    def __init__(self, app: App, key: str | None = None, most_bytes: int = MOST_BYTES):
        self.app, self.key, self.most_bytes = app, key, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message if received <= self.most_bytes else {"type": "http.disconnect"}

        async def sending(message: Message) -> None:
            if received <= self.most_bytes:
                await send(message)

        await self.app(scope, limited, sending)
        if received > self.most_bytes:
            await _answer(send, 413, f"the body has more than {self.most_bytes:,} bytes", "invalid_request_error")

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, str] | None:
        if (unclear := ambiguous(scope["headers"])) is not None:
            return 403, unclear, "forbidden"
        host = host_name(headers.get("host", ""))
        if self.key is None and not is_loopback(host):
            return 403, f"the host {host!r} is not this machine's: start the server with --api-key", "forbidden"
        if is_foreign(headers.get("origin"), headers.get("host", "")):
            return 403, "requests of web pages of other sites are refused", "forbidden"
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.key is not None and scope["path"] not in OPEN and not hmac.compare_digest(given, self.key.encode()):
            return 401, "the API key is missing or wrong: send `Authorization: Bearer KEY`", "invalid_api_key"
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return 415, "send JSON, with the header `Content-Type: application/json`", "invalid_request_error"
        size = headers.get("content-length", "0")
        if not size.isdecimal() or len(size) > 18 or int(size) > self.most_bytes:  # no int of thousands of digits
            return 413, f"the body has more than {self.most_bytes:,} bytes", "invalid_request_error"
        return None


def error_body(message: str, code: str | None, kind: str = "invalid_request_error", param: str | None = None) -> Any:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _answer(send: Send, status: int, message: str, code: str) -> None:
    body = json.dumps(error_body(message, code))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
