"""The application and its server: pages as plain routes, the chat page in Gradio, and the reports of runs.

A page is a function of its address. GET returns the whole page; the page's script receives only the current content.
POST performs the action of a button, which only pages of this site can send (`guard`).
"""

import contextlib
import sys
import threading
import webbrowser
from functools import partial
from pathlib import Path

import fastapi
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response

from posttrain.base.errors import ConfigError
from posttrain.base.system import is_loopback
from posttrain.base.terminal import say
from posttrain.reports.markup import Markup, el
from posttrain.runs.files import is_regular
from posttrain.serving.listening import bounded_server, listen
from posttrain.ui.data_page import check, data_page, read
from posttrain.ui.evaluations_page import evaluations_page
from posttrain.ui.guard import Guard
from posttrain.ui.new_page import new_page, plan, start
from posttrain.ui.parts import FAVICON, POLICY, Query, framed, parse
from posttrain.ui.rollouts_page import rollouts_page
from posttrain.ui.run_page import remove, resume, run_page, save, stop
from posttrain.ui.runs_page import clear, runs_page
from posttrain.ui.viewer import Act, Render, Viewer, attempt, where

SWITCH_S = 0.0005  # seconds between thread switches: a page must not wait for the index's thread at every database row
READING_S = 10.0  # seconds to read runs before the first page is served; the rest is read meanwhile
SHORTEST = 8  # minimum length of a token in characters
SHOWN = "x-shown"  # request header set by a page's script: the version of the content that the page shows
HEADERS = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
# A report may come from a stranger: its scripts may run, but in a separate origin.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "font-src data:"
)
# Path -> the function that renders the page, the seconds between refreshes, and the actions of its buttons by name.
PAGES: dict[str, tuple[Render, int, dict[str, Act]]] = {
    "/": (runs_page, 3, {"clear": clear}),
    "/run": (run_page, 3, {"stop": stop, "resume": resume, "save": save, "delete": remove}),
    "/rollouts": (rollouts_page, 5, {}),
    "/evaluations": (evaluations_page, 10, {}),
    "/data": (data_page, 2, {"read": read, "check": check}),
    "/new": (new_page, 2, {"plan": plan, "start": start}),
}


def application(viewer: Viewer, token: str | None = None, local: bool = True) -> fastapi.FastAPI:
    """The ASGI application: the pages and the reports of runs, protected by the guard."""
    from posttrain.ui import chat  # Gradio takes seconds to import

    app = fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def page(path: str, request: Request) -> Response:
        form = (await request.body()).decode(errors="replace")
        return await run_in_threadpool(_answer, viewer, path, request, form)

    for path, (_, _, acts) in PAGES.items():
        app.add_route(path, partial(page, path), methods=["GET", "POST"] if acts else ["GET"])
    app.add_route("/favicon.ico", lambda _: FileResponse(FAVICON, media_type="image/svg+xml"))

    @app.get("/report")
    def report(run: str = "") -> Response:
        """The report of a run, which cannot access these pages."""
        listed = viewer.runs.find(run)
        file = listed and listed.folder / "report.html"
        if file is None or not is_regular(file):
            text = "This run has no report yet: it is written when the run ends, or by `posttrain report RUN`."
            return PlainTextResponse(text, 404)
        return FileResponse(file, media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY})

    chat.mount(app, viewer)
    app.add_middleware(Guard, token=token, local=local)
    return app


def _answer(viewer: Viewer, path: str, request: Request, form: str) -> Response:
    """The page at an address. The page's script receives only the content, or status 204 if it already has the content.

    For a form, the action is performed first, on the values of the address and the form. An error message of the action
    is not part of the version, so it is shown until the page's content changes.
    """
    address, (render, seconds, acts) = f"?{request.url.query}", PAGES[path]
    error, seen, headers = None, request.headers.get(SHOWN), dict(HEADERS)
    if request.method == "POST":
        fields = parse(f"?{form}")
        act = acts.get(fields.one("act"))
        if act is None:
            return PlainTextResponse("This page has no such action.", 400)
        address = Query((*parse(address).pairs, *fields.pairs)).but(path, act=None)
        done = attempt(act, viewer, address)
        error, address = (done, address) if isinstance(done, Markup) else (None, done or address)
        if error is None and seen is None:
            return RedirectResponse(address, 303)
        headers["Content-Location"] = address
    content = attempt(render, viewer, address)
    above = where(viewer)
    version = str(hash(above + content))
    if seen == version and request.method != "POST":
        return Response(status_code=204)
    shown = el("div", above, None if error == content else error, content, class_="shown", data_version=version)
    html = framed(path, shown, seconds) if seen is None else shown
    return HTMLResponse(html.encode(errors="backslashreplace"), headers=headers)


def serve(root: Path, host: str, port: int, token: str | None, browser: bool, page: str = "") -> None:
    """Serve the pages until Ctrl-C; with `browser`, open `page` in the web browser. Raises ConfigError if the folder is
    a file, if other machines could reach the pages without a token, or if the address cannot be used."""
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file: give the folder that contains the runs")
    local = is_loopback(host)
    if not local and not token:
        raise ConfigError(
            f"--host {host} is reachable from other machines: give a --token (or POSTTRAIN_UI_TOKEN), which the page "
            "asks for, or keep 127.0.0.1 and forward the port (ssh -L)"
        )
    if token and len(token) < SHORTEST:
        raise ConfigError(f"the token has only {len(token)} characters and can be guessed: use at least {SHORTEST}")
    listening = listen(host, port)
    sys.setswitchinterval(SWITCH_S)
    viewer = Viewer(root)
    reading = threading.Thread(target=viewer.warm, daemon=True)  # so that the first page is fast
    reading.start()
    app = application(viewer, token or None, local)
    reading.join(READING_S)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}{page}"
    nothing = "" if root.exists() else ", which does not exist yet"
    say(f"The runs in {root}{nothing}: {address}   (Ctrl-C stops)")
    if browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    server = bounded_server(app, quiet=True, timeout_graceful_shutdown=1)  # pages keep event streams open
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
