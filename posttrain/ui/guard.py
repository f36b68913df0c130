"""Access to the pages: from browsers on this machine, or with a token; never for requests from other web pages."""

import hmac
import json
import re
from pathlib import Path
from string import Template
from urllib.parse import quote, urlencode

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain.base.log import log
from posttrain.base.system import is_loopback
from posttrain.base.terminal import visible
from posttrain.serving.listening import ambiguous, host_name, is_foreign
from posttrain.ui.parts import LONGEST

COOKIE = "posttrain_ui"
MOST_BYTES = 16 << 20  # maximum size of a request to Gradio
FORM = "application/x-www-form-urlencoded"
CHAT = "/chat"  # Gradio's page
UPLOADS = re.compile(r"/+gradio_api/+upload")  # Gradio's upload route, which would write any file to the disk
# Gradio compiles the templates of its components (unsafe-eval). Nothing is loaded from, or sent to, another host.
CHAT_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "worker-src 'self' blob:; frame-src 'self'; frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
POLICY = "default-src 'none'; frame-ancestors 'none'"  # for responses that set no policy
LOGIN = Template(Path(__file__).with_name("login.html").read_text(encoding="utf-8"))
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",  # with no-referrer, browsers would omit the origin of these pages' forms, too
}


class Guard:
    """ASGI middleware. `token`: each browser must enter it once, and a cookie keeps it. `local`: accept only loopback
    host names."""

    def __init__(self, app: ASGIApp, token: str | None, local: bool):
        self.app, self.token, self.local = app, token, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(HTTPConnection(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        body: list[Message] = []
        chat = scope["path"] == CHAT or scope["path"].startswith(f"{CHAT}/")
        posted = scope["type"] == "http" and scope["method"] == "POST"
        event, started = chat and posted, False
        headers = HEADERS | {b"content-security-policy": (CHAT_POLICY if chat else POLICY).encode()}

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if event and message["status"] == 500:  # Gradio's status for inputs that no page sends
                    message["status"] = 400
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *((k, v) for k, v in headers.items() if k not in present)]
            await send(message)

        if posted:
            body = await _received(receive, MOST_BYTES if chat else LONGEST)
            whole = b"".join(message.get("body", b"") for message in body)
            wrong = None
            if chat and not _is_text(whole):
                wrong = PlainTextResponse("The event is not JSON, or contains half of a surrogate pair.", 400)
            elif not chat and HTTPConnection(scope).headers.get("content-type", "").partition(";")[0] != FORM:
                wrong = PlainTextResponse("An action must be sent by a form.", 415)
            elif not chat and len(whole) > LONGEST:
                wrong = PlainTextResponse(f"The form has more than {LONGEST:,} characters.", 413)
            if wrong is not None:
                await wrong(scope, receive, guarded)
                return

        async def received() -> Message:
            return body.pop(0) if body else await receive()

        try:
            await self.app(scope, received, guarded)
        except Exception as error:  # Gradio raises any error for inputs that no page sends
            if not event:
                raise
            log.warning("an event from a page was refused: %s: %s", type(error).__name__, visible(str(error)[:200]))
            log.debug("stack trace of the refused event", exc_info=True)
            if not started:
                await PlainTextResponse("No page sends such an event.", 400)(scope, receive, guarded)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        if (unclear := ambiguous(request.headers)) is not None:
            return PlainTextResponse(unclear, 403)
        if UPLOADS.search(request.scope["path"]):
            return PlainTextResponse("No page uploads files.", 404)
        host = request.headers.get("host", "")
        if self.local and not is_loopback(host_name(host)):
            return PlainTextResponse("This is not a local host name: open http://127.0.0.1.", 403)
        if is_foreign(request.headers.get("origin"), host):
            return PlainTextResponse("Requests from other web pages are refused.", 403)
        if self.token is None or _same(request.cookies.get(COOKIE, ""), self.token):
            return None
        given = request.query_params.get("token", "")
        if _same(given, self.token):
            rest = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
            path = "/" + quote(request.scope["path"].lstrip("/"))  # two slashes would lead to another site
            response = RedirectResponse(f"{path}{f'?{rest}' if rest else ''}", 303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return response
        hint = "This is not the token." if given else "Enter the token given to posttrain ui --token."
        return HTMLResponse(LOGIN.substitute(hint=hint), 401)


async def _received(receive: Receive, most: int) -> list[Message]:
    """The parts of a request body, read until it ends or exceeds `most` bytes."""
    parts, size, more = [], 0, True
    while more and size <= most:
        parts.append(await receive())
        size += len(parts[-1].get("body", b""))
        more = parts[-1].get("more_body", False)
    return parts


def _is_text(body: bytes) -> bool:
    """Whether a body is JSON without lone surrogates, which no page sends and no UTF-8 file can contain."""
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
