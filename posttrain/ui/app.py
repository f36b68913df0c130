"""The application: one Gradio page per module of posttrain.ui.pages, on an address of its own."""

from __future__ import annotations

import warnings
from pathlib import Path

import fastapi
import gradio as gr

from posttrain.serving.process import ModelServers
from posttrain.ui.guard import Guard
from posttrain.ui.pages import chat, data, evaluations, new, rollouts, run, runs
from posttrain.ui.place import Place
from posttrain.ui.report import add_report
from posttrain.ui.theme import FAVICON, HEAD, THEME

MODELS = 3  # in memory at a time: two that answer, and one that scores
# Title -> address, page, whether the bar at the top has it. The first is the front page.
PAGES = {
    "Runs": ("/", runs.page, True),
    "Run": ("/run", run.page, False),
    "Rollouts": ("/rollouts", rollouts.page, True),
    "Evaluations": ("/evaluations", evaluations.page, True),
    "Data": ("/data", data.page, True),
    "Chat": ("/chat", chat.page, True),
    "New run": ("/new", new.page, True),
}


def pages(place: Place) -> gr.Blocks:
    """All pages in one Gradio application."""
    (first, (_, front, _)), *others = PAGES.items()
    with gr.Blocks(title="posttrain", analytics_enabled=False) as blocks:
        _bar(first)
        front(place)
    for title, (path, page, in_bar) in others:
        with blocks.route(title, path, show_in_navbar=in_bar):
            _bar(first)
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


def _bar(first: str) -> None:
    gr.Navbar(main_page_name=first)


def place_of(root: Path) -> Place:
    from posttrain.viewing.viewer import Viewer

    return Place(root, Viewer(root), ModelServers(MODELS))
