"""Export of evaluations to other programs' file formats, without needing those programs (docs/eval-export.md).

This module writes the files of lm-eval 0.4 (the LM Evaluation Harness), as lm-eval does with `--log_samples`:

    MODEL/results_TIME.json, MODEL/samples_TASK_TIME.jsonl

A suite becomes a task; a suite with groups becomes a group of tasks, each with its samples. An item becomes a sample:
`resps` has all completions, and the metric is their mean score. Items that are not graded have no metric and are not
counted.
"""

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from posttrain.base.errors import ConfigError, RunError
from posttrain.base.words import by_key
from posttrain.evaluation import inspect_logs
from posttrain.evaluation.records import COLUMNS, Answer, read_answers, read_summary
from posttrain.runs.atomic import write_file
from posttrain.runs.files import make_folder

FILTER = "none"  # lm-eval's name of the filter if the completion itself is graded
LONE = re.compile("[\ud800-\udfff]")


def export_evaluation(folder: Path, to: str, output: Path | None = None) -> list[Path]:
    """Write a finished evaluation in another program's format, into `output` (default: `folder/NAME`).

    Returns the paths of the files. Exporting an evaluation again replaces each file atomically; other files in
    `output` are kept.

    Raises ConfigError for an unknown format, and RunError if the evaluation is unfinished or damaged, or if a file
    cannot be written.
    """
    if to not in EXPORTS:
        raise ConfigError(f"there is no export {to!r}: give {' or '.join(EXPORTS)}")
    summary = read_summary(folder)
    try:
        files = EXPORTS[to](summary, _by_evaluation(read_answers(folder), summary, folder))
    except KeyError as error:
        raise RunError(f"{folder}: summary.json is damaged: it lacks {error}; run the evaluation again") from error
    output = output or folder / to
    for name, text in files.items():
        path = output / name
        make_folder(path.parent, path)
        write_file(path, text)
    return [output / name for name in files]


def _by_evaluation(answers: Sequence[Answer], summary: dict[str, Any], folder: Path) -> dict[str, list[Answer]]:
    """The answers by suite and setting, keyed as in the summary. Raises RunError if answers and summary differ."""
    keys = {(about["suite"], about["setting"]): key for key, about in summary["suites"].items()}
    found: dict[str, list[Answer]] = {key: [] for key in summary["suites"]}
    for answer in answers:
        key = keys.get((answer.suite, answer.setting))
        if key is None:
            suite = f"{answer.suite} {answer.setting}".strip()
            raise RunError(f"{folder}: answers.jsonl has answers of {suite}, which summary.json lacks: evaluate again")
        texts = {name: getattr(answer, name) for name in COLUMNS if isinstance(getattr(answer, name), str)}
        # Other JSON readers refuse lone surrogates, even as escapes.
        found[key].append(replace(answer, **{name: LONE.sub("\ufffd", text) for name, text in texts.items()}))
    empty = [key for key, group in found.items() if not group]
    if empty:
        raise RunError(f"{folder}: answers.jsonl has no answers of {', '.join(empty)}: evaluate again")
    return found


def lm_eval_files(summary: Mapping[str, Any], evaluations: Mapping[str, Sequence[Answer]]) -> dict[str, str]:
    """The contents of the files by name, relative to the results folder."""
    model = re.sub(r"[\"<>:/|\\?*\[\]]+", "__", summary["model"]["name"])
    time = datetime.fromisoformat(summary["created"]).replace(tzinfo=None).isoformat().replace(":", "-")
    results: dict[str, Any] = {name: {} for name in ("results", "groups", "group_subtasks", "configs", "versions",
                               "n-shot", "higher_is_better", "n-samples")}  # fmt: skip
    files, hashes = {}, {}
    for key, answers in evaluations.items():
        for task, rows in _add_suite(results, key, summary["suites"][key], answers).items():
            hashes[task] = _hash("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows))
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            files[f"{model}/samples_{task}_{time}.jsonl"] = "".join(lines)
    if not results["groups"]:
        del results["groups"]
    results |= _about(summary, model) | {"task_hashes": hashes}
    return {f"{model}/results_{time}.json": json.dumps(results, indent=2, ensure_ascii=False), **files}


def _add_suite(
    results: dict[str, Any], key: str, suite: Mapping[str, Any], answers: Sequence[Answer]
) -> dict[str, list[dict[str, Any]]]:
    """Add one suite to the results, and return the samples of its tasks."""
    name, metric = _name(key, results["results"]), _metric(suite)
    groups = by_key((answer.group, answer) for answer in answers)
    samples: dict[str, list[dict[str, Any]]] = {}
    for group, members in groups.items():
        task = _name(f"{name}_{group}", results["results"] | samples | {name: None}) if group else name
        items = by_key((answer.item, answer) for answer in members).values()
        samples[task] = [_sample(number, item, metric, suite) for number, item in enumerate(items)]
    values = {task: [row[metric] for row in rows if metric in row] for task, rows in samples.items()}
    for task, rows in samples.items():
        alias, own = rows[0]["doc"].get("group", task), values[task]
        error = stdev(own) / math.sqrt(len(own)) if len(own) > 1 else "N/A"
        results["results"][task] = _result(task, alias, metric, own, error)
        results["configs"][task] = {
            "task": task,
            "dataset_path": suite["source"],
            "output_type": "multiple_choice" if _by_logprob(suite) else "generate_until",
            "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": None if _by_logprob(suite) else _generation(suite),
            "repeats": max(answer.sample for answer in answers) + 1,
            "num_fewshot": 0,
            "metadata": {"posttrain": dict(suite)},
        }
        results["n-samples"][task] = {"original": len(rows), "effective": len(own)}
        _register(results, task, metric, [])
    if list(groups) == [""]:
        results["n-samples"][name]["original"] = suite["available"] or len(samples[name])
        return samples
    whole = _result(name, name, metric, [v for group in values.values() for v in group], _pooled(list(values.values())))
    results["results"][name] = results["groups"][name] = whole
    _register(results, name, metric, [task for task in samples if task != name])
    return samples


def _register(results: dict[str, Any], name: str, metric: str, subtasks: list[str]) -> None:
    results["group_subtasks"][name] = subtasks
    results["versions"][name], results["n-shot"][name] = None, 0
    results["higher_is_better"][name] = {metric: True}


def _result(task: str, alias: str, metric: str, values: Sequence[float], error: float | str) -> dict[str, Any]:
    known = {f"{metric},{FILTER}": fmean(values), f"{metric}_stderr,{FILTER}": error} if values else {}
    return {"name": task, "alias": alias, "sample_len": len(values), **known}


def _sample(number: int, answers: Sequence[Answer], metric: str, suite: Mapping[str, Any]) -> dict[str, Any]:
    first = answers[0]
    doc = {"id": first.item, "prompt": first.prompt, "answer": first.gold}
    if first.group:
        doc["group"] = first.group
    target, scores = str(first.gold or ""), [answer.score for answer in answers if answer.score is not None]
    extracted = ["" if answer.extracted is None else answer.extracted for answer in answers]
    # The generation settings; for choices by log-probability, the choice that was the answer.
    asked = first.completion if _by_logprob(suite) else _generation(suite)
    row = {
        "doc_id": number,
        "doc": doc,
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": first.prompt, "arg_1": asked}},
        "resps": [[answer.completion for answer in answers]],
        "filtered_resps": extracted if len(extracted) == 1 else [extracted],
        "filter": FILTER,
        "metrics": [metric] if scores else [],
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(first.prompt),
        "target_hash": _hash(target),
    }
    return row | {metric: fmean(scores)} if scores else row


def _by_logprob(suite: Mapping[str, Any]) -> bool:
    return not {"max_completion_length", "recorded"} & suite["sampling"].keys()


def _metric(suite: Mapping[str, Any]) -> str:
    """lm-eval's metric name: `acc` for choices by log-probability, `exact_match` for right or wrong completions."""
    if suite["metric"] != "accuracy":
        return suite["metric"]
    return "acc" if _by_logprob(suite) else "exact_match"


def _generation(suite: Mapping[str, Any]) -> dict[str, Any]:
    sampling = suite["sampling"]
    known = {name: sampling[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed") if name in sampling}
    known |= {"do_sample": sampling.get("temperature", 0) > 0, "max_gen_toks": sampling.get("max_completion_length")}
    return {"until": list(sampling.get("stop", ())), **known}


def _about(summary: Mapping[str, Any], sanitized: str) -> dict[str, Any]:
    """lm-eval's entries about a run; null for entries about lm-eval's own process."""
    model, suites = summary["model"], summary["suites"].values()
    config = dict.fromkeys(("batch_size", "device", "use_cache", "limit", "gen_kwargs", "random_seed", "numpy_seed",
                            "torch_seed", "fewshot_seed"))  # fmt: skip
    config |= {"model": "posttrain", "model_args": dict(model), "batch_sizes": [], "bootstrap_iters": 0}
    unknown = ("git_hash", "pretty_env_info", "transformers_version", "lm_eval_version", "upper_git_hash",
               "system_instruction", "system_instruction_sha", "fewshot_as_multiturn", "chat_template",
               "chat_template_sha")  # fmt: skip
    return {
        "config": config,
        "date": datetime.fromisoformat(summary["created"]).timestamp(),
        **dict.fromkeys(unknown),
        "posttrain_version": summary["posttrain"],
        "model_source": "posttrain",
        "model_name": model["name"],
        "model_name_sanitized": sanitized,
        "total_evaluation_time_seconds": str(sum(suite["seconds"] for suite in suites)),
    }


def _pooled(groups: Sequence[Sequence[float]]) -> float | str:
    """lm-eval's standard error of a group's mean over all items, pooled over its tasks."""
    groups = [group for group in groups if group]
    size = sum(len(group) for group in groups)
    if size <= len(groups):
        return "N/A"
    squares = sum((len(group) - 1) * stdev(group) ** 2 for group in groups if len(group) > 1)
    return math.sqrt(squares / (size - len(groups)) / size)


def _name(key: str, taken: Container[str]) -> str:
    """A name for a task and its file that is not in `taken`."""
    name = re.sub(r"[^\w.-]+", "_", key)
    while name in taken:
        name += "_"
    return name


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


EXPORTS = {"inspect": inspect_logs.files_of, "lm-eval": lm_eval_files}
