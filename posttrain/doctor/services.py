"""Checks of graders, the hub, trackers, and what pages and servers need."""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from posttrain.base.redaction import redact
from posttrain.base.words import counted
from posttrain.doctor.checks import Broken, Found, version_of
from posttrain.grading.pool import Pool
from posttrain.grading.verdict import GradeRequest, Judgement, Rule

DEADLINE_S = 1.0
GRACE_S = 0.5  # docs/grading.md: a verdict comes at most half a second after the deadline
HUB_S = 8.0
PROBED = "openai-community/gpt2"
START_S = 20.0  # seconds in which a server must start


def _forever(completion: str, gold: str | None) -> Judgement:
    nine = int("9")  # pyright computes a power of literals
    return Judgement(float(nine ** (nine**nine) > 0), True)  # in C, holding the interpreter's lock: no signal ends it


ENDLESS = Rule(lambda gold: None, _forever)


def graders() -> Found:
    """Check that the 20 known pairs of the maths rule are graded correctly, and that an endless answer is killed."""
    versions = [f"{name} {version_of(name)}" for name in ("sympy", "math-verify")]
    from posttrain.config import TagsConfig
    from posttrain.rewards.rules import canary

    known = canary("math", TagsConfig())
    with _pool(deadline=20.0) as pool:  # long enough for a busy machine
        grades = pool.grade([request for request, _ in known])
    wrong = [grade for grade, (_, verdict) in zip(grades, known, strict=True) if grade.verdict != verdict]
    if wrong:
        first = f"{wrong[0].verdict} {wrong[0].reason or ''}".strip()
        remedy = "pip install --force-reinstall sympy math-verify"
        raise Broken(f"{len(wrong)} of {len(known)} known answers are graded wrongly: {first}", remedy)
    with Pool(1, DEADLINE_S, spares=0, modules=(__name__,)) as pool:
        [grade] = pool.grade([GradeRequest(f"{__name__}:ENDLESS", "")])
    if grade.verdict != "timeout":
        raise Broken(f"an endless answer was not killed after {DEADLINE_S:g} s: {grade.verdict}")
    detail = f"{', '.join(versions)}: {len(known)} known answers, endless one killed after {grade.seconds:.1f} s"
    if grade.seconds > DEADLINE_S + GRACE_S:
        return Found(f"{detail}, which is late", "limited", "run posttrain doctor again when this machine is idle")
    return Found(detail)


def isolation() -> Found:
    """The restrictions of a grading worker that are in force here."""
    with _pool(deadline=20.0) as pool:
        pool.grade([GradeRequest("posttrain.rewards.maths:MATH", r"\boxed{2}", "2")])
        in_force = pool.isolation
    detail = ", ".join(in_force) or "none but the deadline"
    if sys.platform == "linux" and not {"no network", "no TCP"} & set(in_force):
        return Found(f"{detail}; graders may open connections", "limited", "allow unprivileged user namespaces")
    return Found(detail, "ok" if in_force else "limited")


def _pool(deadline: float) -> Pool:
    from posttrain.rewards.rules import modules_of

    return Pool(1, deadline, spares=0, modules=modules_of(["math"]))


def hub() -> Found:
    """Check whether the hub answers. If not, show the local cache, which then supplies models and data."""
    from huggingface_hub import HfApi, constants

    from posttrain.base.hub import stay_offline_without_network

    endpoint, by_user = redact(constants.ENDPOINT), constants.HF_HUB_OFFLINE
    stay_offline_without_network()
    if constants.HF_HUB_OFFLINE:
        why = "offline by HF_HUB_OFFLINE" if by_user else f"{urlsplit(endpoint).hostname} does not resolve"
        remedy = "unset HF_HUB_OFFLINE" if by_user else "connect to the network, or set HF_HUB_OFFLINE=1"
        return Found(f"{why}: only the local cache, {_cached()}", "limited", remedy)
    began = time.monotonic()
    try:
        HfApi().model_info(PROBED, timeout=HUB_S)
    except Exception as error:  # from any HTTP library that the hub's library uses
        why = redact(f"{type(error).__name__}: {error}".splitlines()[0])
        detail = f"{endpoint} does not answer ({why}); cache: {_cached()}"
        return Found(detail, "limited", "check the network and HTTPS_PROXY")
    return Found(f"{endpoint} answers in {time.monotonic() - began:.1f} s")


def _cached() -> str:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    models, sets = (sum(name.startswith(f"{kind}--") for name in names) for kind in ("models", "datasets"))
    return f"{counted(models, 'model')} and {counted(sets, 'data set')}"


def hub_token() -> Found:
    """Check whether there is a token, and whether the hub accepts it. The token is never shown."""
    from huggingface_hub import HfApi, constants, get_token

    from posttrain.base.hub import stay_offline_without_network

    source = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the login of `hf auth login`"
    if get_token() is None:
        return Found("none; private and gated repositories need one", "absent", "hf auth login, or HF_TOKEN=… in .env")
    stay_offline_without_network()
    if constants.HF_HUB_OFFLINE:
        return Found(f"from {source}; not checked, the hub is offline")
    try:
        HfApi().whoami()
    except Exception as error:
        return Found(f"from {source}, not accepted ({type(error).__name__})", "limited", "hf auth login")
    return Found(f"from {source}, accepted")


def tensorboard() -> Found:
    """Check that TensorBoard reads an event file from torch's writer."""
    version = version_of("tensorboard", "tracking.report_to: tensorboard", "track")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_scalar("loss", 1.0, 1)
        [file] = Path(folder).iterdir()
        steps = [event.step for event in EventFileLoader(str(file)).Load() if event.summary.value]
    if steps != [1]:
        raise Broken(f"{version}: a written event is not read", "pip install -U tensorboard")
    return Found(f"{version}: an event is written and read")


def wandb() -> Found:
    """Check that a run is written to a folder without the network."""
    version = version_of("wandb", "tracking.report_to: wandb", "track")
    import wandb

    from posttrain.runs.tracking import has_wandb_key

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        quiet = wandb.Settings(silent=True, console="off", save_code=False, disable_git=True)
        run = wandb.init(mode="offline", dir=folder, project="doctor", settings=quiet)
        run.log({"loss": 1.0})
        run.finish()
        written = list(Path(folder).rglob("*.wandb"))
    if not written:
        raise Broken(f"{version}: a run leaves no file", "pip install -U wandb")
    key = "a key to log in" if has_wandb_key() else "no key, so runs stay offline"
    return Found(f"{version}: an offline run is written; {key}")


def trackio() -> Found:
    """Check that a run is written to a new database."""
    version = version_of("trackio", "tracking.report_to: trackio", "track")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TRACKIO_DIR"] = folder  # trackio reads it when it is imported
        os.environ.pop("TRACKIO_SPACE_ID", None)
        import trackio

        run = trackio.init(project="doctor", embed=False, auto_log_cpu=False)
        run.log({"loss": 1.0})
        trackio.finish()
        written = list(Path(folder).glob("*.db"))
    if not written:
        raise Broken(f"{version}: a run leaves no database", "pip install -U trackio")
    return Found(f"{version}: a run is written")


def server() -> Found:
    """Check that a server on this machine answers a request."""
    versions = [f"{name} {version_of(name, 'posttrain serve and chat', 'serve')}" for name in ("fastapi", "uvicorn")]
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
        status = answer.status_code
        raise Broken(f"a request to this machine is answered with {status}", "pip install -U fastapi uvicorn")
    return Found(f"{', '.join(versions)}: a request is answered")


def pages() -> Found:
    """Check that the description of a page, which a browser receives, has components."""
    version = version_of("gradio", "posttrain ui", "ui")
    import gradio

    with gradio.Blocks(analytics_enabled=False) as blocks:
        gradio.Markdown("doctor")
    if not blocks.get_config_file()["components"]:
        raise Broken(f"gradio {version}: a page has no components", "pip install -U gradio")
    return Found(f"gradio {version}: a page works")
