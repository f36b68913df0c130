"""A finished evaluation with all that exports have to carry: samples, groups, other scores, no grade, odd strings."""

import json
from dataclasses import asdict
from pathlib import Path

from posttrain.evaluation.records import Answer

CREATED = "2026-11-25T00:10:00+00:00"
SAMPLING = {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "num_generations": 2,
            "max_completion_length": 64, "stop": ["Question:"], "seed": 7}  # fmt: skip


def answer(suite: str, item: str, score: float | None, verdict: str = "", **more) -> Answer:
    verdict = verdict or {1.0: "correct", 0.0: "wrong", None: "timeout"}.get(score, "scored")
    facts = {
        "suite": suite, "setting": "", "item": item, "sample": 0, "group": "", "prompt": f"Question: {item}?\nAnswer:",
        "gold": "42", "completion": " The answer is 42.", "extracted": "42", "verdict": verdict, "score": score,
        "format_and_answer": "", "tokens": 7, "finish_reason": "stop", "seconds": 0.25,
        "reason": "the deadline of 2 s passed" if score is None else None,
    }  # fmt: skip
    return Answer(**facts | more)


def answers() -> list[Answer]:
    found = []
    for item, scores in enumerate([(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (None, 1.0), (None, None)]):
        for sample, score in enumerate(scores):
            more = {"completion": f"caf\u00e9 \u2028 \x1b[31m {sample}", "format_and_answer": "11" if score else ""}
            more |= {"setting": "temperature=0.6", "sample": sample, "finish_reason": ("stop", "length")[sample]}
            found.append(answer("gsm8k", str(item), score, **more))
    by_logprob = {"completion": " B", "extracted": "B", "gold": "B", "tokens": 1}
    grouped = [("anatomy", 1.0), ("anatomy", 0.0), ("a/b", 0.0), ("a/b", 1.0), ("a b", 1.0)]
    for item, (group, score) in enumerate(grouped):
        found.append(answer("mmlu_logprob", f"{group}/{item}", score, group=group, **by_logprob))
    for item, score in enumerate((0.25, 0.5, 1.0)):
        found.append(answer("ifeval", str(item), score, gold=None, extracted=None, tokens=0, finish_reason=""))
    return [*found, answer("refusals", "only", None, prompt="half a pair: \ud83d")]


def summary_of(suite: str, setting: str = "", metric: str = "accuracy", **more) -> dict:
    own = [one for one in answers() if one.suite == suite]
    graded = [one.score for one in own if one.score is not None]
    return {
        "suite": suite, "setting": setting, "source": f"data/{suite}.jsonl", "metric": metric,
        "value": sum(graded) / len(graded) if graded else None, "low": 0.1, "high": 0.9, "standard_error": 0.1,
        "confidence": 0.95, "items": len({one.item for one in own}), "available": 100, "partial": "5 of 100 items",
        "samples": 1, "graded": len(graded), "answers": len(own), "ungraded": {}, "verdicts": {}, "pass@k": {},
        "maj@k": {}, "classes": {}, "groups": {}, "tokens": sum(one.tokens for one in own), "truncated": 0,
        "seconds": 2.5, "sampling": SAMPLING,
    } | more  # fmt: skip


def write_evaluation(folder: Path) -> Path:
    suites = {
        "gsm8k temperature=0.6": summary_of("gsm8k", "temperature=0.6"),
        "mmlu_logprob": summary_of("mmlu_logprob", sampling={}),
        "ifeval": summary_of("ifeval", metric="strict_accuracy", sampling={"recorded": "completions"}),
        "refusals": summary_of("refusals", metric="refusal"),
    }
    model = {"name": "stories260K", "path": "models/stories260K", "content": "ab" * 32}
    summary = {"format": 1, "posttrain": "0.1.0", "created": CREATED, "model": model, "suites": suites}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "answers.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in answers()))
    return folder
