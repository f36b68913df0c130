"""lm-eval's tasks as suites of `posttrain eval`: `--suite lm-eval:TASK`."""

import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.suite import SuiteConfig
from posttrain.evaluation.items import Items
from posttrain.evaluation.records import EvaluationStore, summarise, write_files
from posttrain.evaluation.running import started
from posttrain.runs.inputs import content_of
from posttrain.runs.provenance import now


@dataclass(frozen=True, slots=True)
class Tasks:
    """lm-eval's tasks to run: names or task files. Sampling settings come from the task."""

    names: tuple[str, ...]
    rollout: RolloutConfig
    max_rows: int | None = None
    chat: bool = False
    system_prompt: str | None = None
    seed: int = 0


def evaluate_tasks(
    model: ModelConfig, name: str, tasks: Tasks, devices: DevicesConfig, folder: Path, overwrite: bool = False
) -> tuple[dict[str, Any], set[str]]:
    """Run the tasks and add them to the records of the folder. Returns the summary, and the names of the suites. A
    stopped task starts again; a finished one is kept. Raises RunError if it had other settings or another model."""
    content, ran, summary = content_of(model), set[str](), dict[str, Any]()
    with EvaluationStore(folder, overwrite) as store:
        store.is_of(content)
        for task in tasks.names:
            facts = {
                "model": content,
                "dtype": model.dtype,
                "task": task,
                "engine": tasks.rollout.engine,
                "max rows": tasks.max_rows,
                "chat": tasks.chat,
                "system prompt": tasks.system_prompt,
                "seed": tasks.seed,
            }
            before = [key for key in store.summaries() if (store.facts(key) or {}).get("task") == task]
            done = {store.summaries()[key]["suite"] for key in before if started(store, key, facts)}
            ran |= done or _run(model, task, tasks, devices, facts, store)
            summary = write_files(folder, store, {"name": name, "path": model.path, "content": content}, now())
        return summary, ran


def _run(
    model: ModelConfig, task: str, tasks: Tasks, devices: DevicesConfig, facts: dict[str, Any], store: EvaluationStore
) -> set[str]:
    from posttrain.evaluation.lm_eval_model import answers_of, run_lm_eval  # needs lm-eval

    began = time.perf_counter()
    results = run_lm_eval(
        model,
        [task],
        tasks.rollout,
        devices,
        limit=tasks.max_rows,
        chat=tasks.chat,
        system_instruction=tasks.system_prompt,
        seed=tasks.seed,
    )
    seconds = time.perf_counter() - began
    names = set()
    for (suite, setting), group in groupby(answers_of(results), key=lambda answer: (answer.suite, answer.setting)):
        answers, key = list(group), f"{suite} {setting}".strip()
        store.start(key, facts)
        positions = [int(one.item) if one.item.isdecimal() else answers.index(one) for one in answers]
        store.add(key, list(zip(positions, answers, strict=True)))
        documents = len({answer.item for answer in answers})
        whole = tasks.max_rows is None or documents < tasks.max_rows
        settings = SuiteConfig(name=suite, source=f"lm-eval {suite}", rule="none", answer=None)
        items = Items(settings, (), documents, None if whole else f"the first {documents:,} documents", "")
        samples = max(answer.sample for answer in answers) + 1
        store.finish(key, summarise(items, setting, answers, samples, {"lm-eval": task}, seconds))
        names.add(suite)
    return names
