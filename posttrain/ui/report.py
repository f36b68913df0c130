"""`/report?run=NAME`: the report of a run, as its own page without any right on this one."""

from __future__ import annotations

import fastapi
from starlette.responses import FileResponse, PlainTextResponse, Response

from posttrain.store.files import is_regular
from posttrain.ui.place import Place

# The file is the run's, which may be a stranger's: it may run its own scripts, in an origin of its own.
POLICY = (
    "sandbox allow-scripts; default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "font-src data:"
)


def add_report(app: fastapi.FastAPI, place: Place) -> None:
    @app.get("/report")
    def report(run: str = "") -> Response:
        row = place.viewer.runs.find(run)
        file = row and row.folder / "report.html"
        if file is None or not is_regular(file):
            return PlainTextResponse(
                "There is no report of this run: it is written when a run ends, or by `posttrain report RUN`.", 404
            )
        return FileResponse(file, media_type="text/html", headers={"Content-Security-Policy": POLICY})
