"""What pages and servers need."""

from __future__ import annotations

import threading
import time

from posttrain.doctor.finding import Broken, Found
from posttrain.doctor.requirements import absent, version_of

START_S = 20.0


def server() -> Found:
    """A request to an application on this machine."""
    for package in ("fastapi", "uvicorn"):
        if missing := absent(package, package, "posttrain serve and chat", "serve"):
            return missing
    import httpx
    import uvicorn
    from fastapi import FastAPI

    from posttrain.serving.listening import listen

    app = FastAPI()
    app.get("/health")(lambda: {"status": "ok"})
    with listen("127.0.0.1", 0) as listening:
        running = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=running.run, args=[[listening]], daemon=True)
        thread.start()
        try:
            until = time.monotonic() + START_S
            while not running.started and time.monotonic() < until:
                time.sleep(0.01)
            address = f"http://127.0.0.1:{listening.getsockname()[1]}/health"
            answer = httpx.get(address, timeout=START_S, trust_env=False)
        finally:
            running.should_exit = True
            thread.join(START_S)
    if answer.json() != {"status": "ok"}:
        raise Broken(
            f"a request to this machine is answered with {answer.status_code}", "pip install -U fastapi uvicorn"
        )
    return Found(f"fastapi {version_of('fastapi')}, uvicorn {version_of('uvicorn')}: a request is answered")


def pages() -> Found:
    """A page is described, as a browser gets it."""
    if missing := absent("gradio", "gradio", "posttrain ui", "ui"):
        return missing
    import gradio

    with gradio.Blocks(analytics_enabled=False) as blocks:
        gradio.Markdown("doctor")
    if not blocks.get_config_file()["components"]:
        raise Broken(f"gradio {version_of('gradio')}: a page has no parts", "pip install -U gradio")
    return Found(f"gradio {version_of('gradio')}: a page is made")
