"""The application: the pages in Gradio, each on an address of its own, and the reports of runs."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fastapi
import gradio as gr
from starlette.responses import FileResponse, PlainTextResponse, Response

from posttrain.runs.files import is_regular
from posttrain.serving.process import ModelServers
from posttrain.ui import chat
from posttrain.ui.data_page import check, data_page, read
from posttrain.ui.evaluations_page import evaluations_page
from posttrain.ui.guard import Guard
from posttrain.ui.new_page import new_page, plan, start
from posttrain.ui.rollouts_page import rollouts_page
from posttrain.ui.run_page import run_page
from posttrain.ui.runs_page import runs_page
from posttrain.ui.theme import FAVICON, HEAD, THEME
from posttrain.ui.view import Place, view
from posttrain.ui.viewer import Viewer

MODELS = 3  # in memory at a time: two that answer, and one that scores
# Title -> address, page, whether the bar at the top has it. The first is the front page.
PAGES: dict[str, tuple[str, Callable[[Place], object], bool]] = {
    "Runs": ("/", partial(view, render=runs_page, seconds=3), True),
    "Run": ("/run", partial(view, render=run_page, seconds=3), False),
    "Rollouts": ("/rollouts", partial(view, render=rollouts_page, seconds=5), True),
    "Evaluations": ("/evaluations", partial(view, render=evaluations_page, seconds=10), True),
    "Data": ("/data", partial(view, render=data_page, seconds=2, acts={"read": read, "check": check}), True),
    "Chat": ("/chat", chat.page, True),
    "New run": ("/new", partial(view, render=new_page, seconds=2, acts={"plan": plan, "start": start}), True),
}
# The file is the run's, which may be a stranger's: it may run its own scripts, in an origin of its own.
POLICY = (
    "sandbox allow-scripts; default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "font-src data:"
)


def pages(place: Place) -> gr.Blocks:
    """All pages in one Gradio application."""
    (first, (_, front, _)), *others = PAGES.items()
    with gr.Blocks(title="posttrain", analytics_enabled=False) as blocks:
        gr.Navbar(main_page_name=first)
        front(place)
    for title, (path, page, in_bar) in others:
        with blocks.route(title, path, show_in_navbar=in_bar):
            gr.Navbar(main_page_name=first)
            page(place)
    return blocks


def application(place: Place, token: str | None = None, local: bool = True) -> fastapi.FastAPI:
    """The ASGI application: the pages, the reports of runs, and what guards them."""
    app = fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    add_report(app, place)
    blocks = pages(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that several pages are not rendered by a Node server, unasked
        app = gr.mount_gradio_app(
            app, blocks, path="/", footer_links=[], run_history=False, show_error=False, ssr_mode=False, pwa=False,
            mcp_server=False, enable_monitoring=False, theme=THEME, head=HEAD, favicon_path=str(FAVICON),
            max_file_size="16mb", app_kwargs={"openapi_url": None, "docs_url": None, "redoc_url": None},
        )  # fmt: skip
    app.add_middleware(Guard, token=token, local=local)
    return app


def add_report(app: fastapi.FastAPI, place: Place) -> None:
    """Serve `/report?run=NAME`: the report of a run, as its own page without any right on this one."""

    @app.get("/report")
    def report(run: str = "") -> Response:
        row = place.viewer.runs.find(run)
        file = row and row.folder / "report.html"
        if file is None or not is_regular(file):
            return PlainTextResponse(
                "There is no report of this run: it is written when a run ends, or by `posttrain report RUN`.", 404
            )
        return FileResponse(file, media_type="text/html", headers={"Content-Security-Policy": POLICY})


def place_of(root: Path) -> Place:
    return Place(root, Viewer(root), ModelServers(MODELS))
