"""A view: HTML that is a function of the page's address, renewed by its links and forms and by a timer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from posttrain.reports.chart import HOVER
from posttrain.serving.process import ModelServers
from posttrain.ui.viewer import Act, Render, Viewer, rendered

SCRIPT = HOVER + Path(__file__).with_name("view.js").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of runs, what reads it, and the models at work."""

    root: Path
    viewer: Viewer
    servers: ModelServers  # of the models that one talks to


def view(place: Place, render: Render, seconds: float | None = None, acts: Mapping[str, Act] | None = None) -> gr.HTML:
    """Show `render(viewer, query)`, for the address of the page now; every `seconds`, if it has changed meanwhile.

    `acts` are what buttons do that change something: `data-act` names one, which is asked for by POST.
    """
    address, digest = gr.State(""), gr.State(0)
    shown = gr.HTML(js_on_load=SCRIPT, apply_default_css=False, elem_classes=["view"])

    def load(request: gr.Request):
        return go(f"?{request.query_params}")

    def follow(event: gr.EventData):
        return go(str(getattr(event, "address", "")))

    def do(event: gr.EventData):
        at, act = str(getattr(event, "address", "")), (acts or {}).get(str(getattr(event, "act", "")))
        made = rendered(render, place.viewer, at, act)
        return made, at, hash(rendered(render, place.viewer, at))  # what was refused stays until the page changes

    def go(at: str):
        made = rendered(render, place.viewer, at)
        return made, at, hash(made)

    def renew(at: str, before: int):
        made = rendered(render, place.viewer, at)
        return (gr.skip(), before) if hash(made) == before else (made, hash(made))

    outputs = [shown, address, digest]
    gr.on(None, load, None, outputs, show_progress="hidden", api_visibility="private")
    # One after another, none dropped while another is at work: the last one shows the page's own address.
    quiet: Any = {"show_progress": "hidden", "api_visibility": "private", "trigger_mode": "multiple"}
    shown.click(follow, None, outputs, **quiet)
    if acts:
        shown.submit(do, None, outputs, **quiet)
    if seconds is not None:
        timer, changed = gr.Timer(seconds), [shown, digest]
        timer.tick(renew, [address, digest], changed, show_progress="hidden", api_visibility="private")
    return shown
