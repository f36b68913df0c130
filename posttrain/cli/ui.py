"""`posttrain ui`: the pages in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.options import Flag


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder of runs, as output_dir in the settings.")
    ] = Path("runs"),
    host: Annotated[str, Flag("Address to listen on; any but this machine's own needs a token.")] = "127.0.0.1",
    port: Annotated[int, Flag("Port to listen on.", min=1, max=65535)] = 7860,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="POSTTRAIN_UI_TOKEN",
            show_envvar=False,
            help="Asked for once in every browser. POSTTRAIN_UI_TOKEN keeps it out of the list of processes.",
        ),
    ] = None,
    no_browser: Annotated[bool, Flag("Print the address only.")] = False,
) -> None:
    """Look at runs in a browser: curves, rollouts down to the token, evaluations. Ctrl-C ends it.

    The pages follow runs that train, and change nothing in them. They are served to this machine alone
    (http://127.0.0.1:7860); to see them from elsewhere, forward the port (ssh -L 7860:127.0.0.1:7860 HOST), or give
    --host and a --token. Nothing is loaded from, or sent to, any other host.
    """
    from posttrain.base.extras import need

    need("gradio", "ui", "posttrain ui")
    from posttrain.ui.app import serve

    serve(folder.expanduser(), host, port, token, browser=not no_browser)
