"""Logs of an evaluation in Inspect's JSON format, version 2 (inspect.aisi.org.uk).

Each suite and setting has its own log. An item becomes a sample, and each of its completions an epoch; values are
averaged over epochs, then over samples, as by Inspect's `accuracy`, `mean` and `stderr`. An ungraded completion has the
score NaN, which Inspect's metrics ignore, and a reason.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from statistics import fmean, stdev
from typing import Any

from posttrain.base.words import by_key
from posttrain.evaluation.records import Answer

LETTERS = {"correct": "C", "wrong": "I"}
STOP_REASONS = {"stop": "stop", "length": "max_tokens"}
SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_completion_length": "max_tokens",
            "seed": "seed"}  # fmt: skip
NAMES = str.maketrans("_/:+ ", "-----")


def files_of(summary: Mapping[str, Any], evaluations: Mapping[str, Sequence[Answer]]) -> dict[str, str]:
    """The logs by file name. The names begin with a time, because Inspect lists only such files."""
    files = {}
    for key, answers in evaluations.items():
        log = log_of(summary, key, answers)
        spec = log["eval"]
        name = "_".join(part.translate(NAMES) for part in (spec["created"], key, spec["task_id"]))
        files[f"{name}.json"] = json.dumps(log, ensure_ascii=False, indent=1) + "\n"
    return files


def log_of(summary: Mapping[str, Any], key: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """One suite's log, as JSON values."""
    model, suite = summary["model"], summary["suites"][key]
    sampling = suite["sampling"]
    scorer = suite["metric"] if suite["metric"] != "accuracy" else "graded"
    metrics = ("accuracy" if all(answer.verdict != "scored" for answer in answers) else "mean", "stderr")
    run = _id(summary["created"], model["name"])
    samples = [
        _sample(answer, model["name"], scorer, _id(run, key, answer.item, answer.sample), summary["created"])
        for answer in answers
    ]
    reductions = _reductions(samples, answers, scorer)
    scored = [row["value"] for row in reductions if not math.isnan(row["value"])]
    # As in Inspect's metrics: NaN without scores, and the error 0 of a single score.
    error = stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else 0.0
    values = (fmean(scored), error) if scored else (math.nan, math.nan)
    usage, ended = _usage(sum(answer.tokens for answer in answers)), datetime.fromisoformat(summary["created"])
    return {
        "version": 2,
        "status": "success",
        "eval": _spec(summary, key, answers, scorer, metrics),
        "plan": {
            "name": "plan",
            "steps": [{"solver": "generate", "params": {}, "params_passed": {}}],
            "config": {name: sampling[ours] for ours, name in SAMPLING.items() if ours in sampling},
        },
        "results": {
            "total_samples": len(answers),
            "completed_samples": len(answers),
            "scores": [
                {
                    "name": scorer,
                    "scorer": scorer,
                    "scored_samples": len(scored),
                    "unscored_samples": len(reductions) - len(scored),
                    "params": {},
                    "metrics": {
                        name: {"name": name, "value": value, "params": {}}
                        for name, value in zip(metrics, values, strict=True)
                    },
                }
            ],
            "headline": {"scorer": scorer, "score": scorer, "metric": metrics[0]},
            "metadata": {"posttrain": suite},
        },
        "stats": {
            # Summaries record only the time of their end; the duration is that of generation.
            "started_at": (ended - timedelta(seconds=suite["seconds"])).isoformat(),
            "completed_at": ended.isoformat(),
            "model_usage": {model["name"]: usage},
            "role_usage": {},
        },
        "samples": samples,
        "reductions": [{"scorer": scorer, "samples": reductions}],
    }


def _spec(
    summary: Mapping[str, Any], key: str, answers: Sequence[Answer], scorer: str, metrics: Sequence[str]
) -> dict[str, Any]:
    model, suite = summary["model"], summary["suites"][key]
    run, items = _id(summary["created"], model["name"]), list(dict.fromkeys(answer.item for answer in answers))
    definitions = [{"name": f"inspect_ai/{name}", "options": {}} for name in metrics]
    return {
        "eval_id": _id(run, key),
        "run_id": run,
        "created": summary["created"],
        "task": suite["suite"],
        "task_id": _id("task", key),
        "task_version": 0,
        "task_display_name": key,
        "task_attribs": {},
        "task_args": {},
        "task_args_passed": {},
        "dataset": {
            "name": suite["suite"],
            "location": suite["source"],
            "samples": len(items),
            "sample_ids": items,
            "shuffled": False,
        },
        "model": model["name"],
        "model_generate_config": {},
        "model_args": {name: value for name, value in model.items() if name != "name" and value is not None},
        "config": {"epochs": max(answer.sample for answer in answers) + 1},
        "packages": {"posttrain": summary["posttrain"]},
        "metadata": {"setting": suite["setting"], "partial": suite["partial"]},
        "scorers": [{"name": scorer, "options": {}, "metrics": definitions, "metadata": {}}],
    }


def _sample(answer: Answer, model: str, scorer: str, uuid: str, time: str) -> dict[str, Any]:
    prompt = {"id": _id(uuid, "prompt"), "content": answer.prompt, "source": "input", "role": "user"}
    reply = {"id": _id(uuid, "reply"), "content": answer.completion, "source": "generate", "role": "assistant",
             "model": model}  # fmt: skip
    usage, score = _usage(answer.tokens), _score(answer)
    output = {
        "model": model,
        "choices": [{"message": reply, "stop_reason": STOP_REASONS.get(answer.finish_reason, "unknown")}],
        "completion": answer.completion,
        "usage": usage,
        "time": answer.seconds,
    }
    # The two events of a sample are its transcript, which Inspect shows first.
    asked = {"event": "model", "model": model, "input": [prompt], "tools": [], "tool_choice": "none", "config": {},
             "output": output, "working_time": answer.seconds, "working_start": 0.0}  # fmt: skip
    graded = {"event": "score", "score": score, "target": answer.gold or "", "scorer": scorer, "intermediate": False,
              "working_start": answer.seconds}  # fmt: skip
    return {
        "id": answer.item,
        "epoch": answer.sample + 1,
        "input": answer.prompt,
        "target": answer.gold or "",
        "messages": [prompt, reply],
        "output": output,
        "scores": {scorer: score},
        "metadata": {"group": answer.group} if answer.group else {},
        "store": {},
        "events": [event | {"uuid": _id(uuid, event["event"]), "timestamp": time} for event in (asked, graded)],
        "model_usage": {model: usage},
        "role_usage": {},
        "total_time": answer.seconds,
        "working_time": answer.seconds,
        "uuid": uuid,
        "attachments": {},
    }


def _score(answer: Answer) -> dict[str, Any]:
    """The score: a letter if it follows from the verdict, otherwise a number; NaN if there is no score."""
    letter = LETTERS.get(answer.verdict)
    known = {"verdict": answer.verdict}
    if answer.format_and_answer:
        known["format_and_answer"] = answer.format_and_answer
    score = {"value": math.nan if answer.score is None else answer.score, "answer": answer.extracted, "metadata": known}
    if answer.score is not None and answer.score == (answer.verdict == "correct") and letter:
        score["value"] = letter
    if answer.reason is not None:
        score["explanation"] = answer.reason
    if answer.score is None:
        score["reason"] = answer.verdict
    return score


def _reductions(samples: Sequence[Any], answers: Sequence[Answer], scorer: str) -> list[dict[str, Any]]:
    """Reduce each sample over its epochs, to the mean score and the facts that all epochs share."""
    rows = []
    for item, group in by_key((pair[1].item, pair) for pair in zip(samples, answers, strict=True)).items():
        values = [float(answer.score) for _, answer in group if answer.score is not None]
        first, *others = (sample["scores"][scorer] for sample, _ in group)
        same = {name: first.get(name) for name in ("answer", "explanation", "reason")}
        same = {name: value for name, value in same.items() if all(score.get(name) == value for score in others)}
        value = fmean(values) if values else math.nan
        rows.append({"value": value, **same, "metadata": first["metadata"], "sample_id": item})
    return rows


def _usage(tokens: int) -> dict[str, int]:
    """Token counts of completions; prompt tokens are not recorded."""
    return {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}


def _id(*parts: object) -> str:
    """An identifier that is the same in every export of an evaluation, so that an export replaces the earlier one."""
    return hashlib.blake2s("\0".join(map(str, parts)).encode(), digest_size=11).hexdigest()
