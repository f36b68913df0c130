"""The results of a finished run: results.json, curves.png, report.html, and a summary on the console."""

from __future__ import annotations

import logging
from typing import Any

from posttrain.memory import peak_memory
from posttrain.reports.curves import write_curves
from posttrain.reports.progress import duration
from posttrain.reports.report import write_report
from posttrain.training.job import Job
from posttrain.training.loop import Loop
from posttrain.words import counted

log = logging.getLogger("posttrain")


def finish(job: Job, loop: Loop) -> None:
    """Write the run's final metrics, its curves and its report."""
    run, lines = job.run, job.run.read_metrics()
    state = loop.state
    results = {
        "method": job.config.method.type,
        "model": job.model.path,
        "steps": state.step,
        "num_tokens": state.num_tokens,
        "skipped_steps": state.skipped,
        "train_runtime": round(state.seconds, 3),
        "save_seconds": round(state.save_seconds, 3),
        "tokens_per_second": round(state.num_tokens / state.seconds, 1) if state.seconds else 0.0,
        "peak_memory_gib": round(peak_memory(job.device) / 2**30, 3),
        "start": last_values(lines[::-1]),
        "final": last_values(lines),
    }
    if state.best is not None:
        results["best"] = {str(job.config.best_metric): state.best}
    run.write_results(results)
    if job.config.method.head == "reward":
        run.write_final_results(results)
    run.set_counters({"skipped_steps": state.skipped})
    run.set_state("finished")
    title = f"{job.config.method.type} of {job.model.folder_name}"
    write_curves(lines, run.folder / "curves.png", title)
    write_report(run.folder, title)
    log.info("done, %s in %s: %s", counted(state.step, "step"), duration(state.seconds), run.folder)


def last_values(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The last value of every metric, without step, epoch and time."""
    values: dict[str, float] = {}
    for line in lines:
        values |= {k: v for k, v in line.items() if k not in ("step", "epoch", "time") and v is not None}
    return values
