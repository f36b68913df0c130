"""One grading worker: `python -m posttrain.grading.worker`. Its arguments are modules to import first.

Jobs come in on stdin, replies go out, a JSON object a line:

    in    {"rule": "module:NAME", "completion": …, "gold": …, "options": {…}, "deadline": seconds}
    out   {"ready": [what isolation is in force]}     once, when everything is imported; or {"failed": why}
          {"gold": true}                              the reference answer is usable: what follows is the completion's
          {"verdict": …, "score": …, "extracted": …, "parts": {…}}  or  {"verdict": …, "reason": …}
          with "retire": true                         in the last reply of a worker that ends itself

What a model wrote comes in as JSON text and its judgement goes out as JSON of bounded length: nothing is pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from functools import lru_cache
from typing import Any, BinaryIO

from posttrain.grading.isolation import MEMORY_BYTES, allow_cpu_seconds, isolate
from posttrain.grading.verdict import EXTRACTED_CHARACTERS, BadGold, Rule
from posttrain.memory import peak_of_process

RETIRE_BYTES = MEMORY_BYTES // 2  # above this ordinary answers could run out of memory
ORPHAN_S = 0.5  # how often a worker looks whether its parent is still there


def main() -> None:
    jobs, replies = _take_pipes()
    for name in ("SIGINT", "SIGHUP"):  # Ctrl-C and a closed terminal are the parent's to handle
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        for module in sys.argv[1:]:
            warm_up = getattr(importlib.import_module(module), "warm_up", None)
            if warm_up is not None:
                warm_up()
    except Exception as error:
        _say(replies, {"failed": f"{type(error).__name__}: {error}"[:EXTRACTED_CHARACTERS]})
        return
    in_force = isolate()
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    _say(replies, {"ready": in_force})
    for line in jobs:
        job = json.loads(line)
        allow_cpu_seconds(job["deadline"])
        reply = grade(job, replies)
        retire = reply.pop("retire", False) or peak_of_process() > RETIRE_BYTES
        _say(replies, reply | ({"retire": True} if retire else {}))
        if retire:
            return


def grade(job: dict[str, Any], replies: BinaryIO) -> dict[str, Any]:
    """The reply to one job. A rule's own mistakes are a crash; an answer it cannot read is its to call wrong."""
    try:
        rule = _rule(job["rule"])
        try:
            _check_gold(job["rule"], job["gold"], json.dumps(job["options"], sort_keys=True))
        except BadGold as error:
            return {"verdict": "bad_gold", "reason": str(error)[:EXTRACTED_CHARACTERS]}
        _say(replies, {"gold": True})
        judged = rule.judge(job["completion"], job["gold"], **job["options"])
        extracted = judged.extracted
        return {
            "verdict": "correct" if judged.correct else "wrong",
            "score": judged.score,
            "extracted": None if extracted is None else extracted[:EXTRACTED_CHARACTERS],
            "parts": dict(judged.parts),
        }
    except MemoryError:
        return {"verdict": "crashed", "reason": "out of memory", "retire": True}
    except Exception as error:  # never str(error): it could hold an expression that takes for ever to print
        return {"verdict": "crashed", "reason": type(error).__name__}


@lru_cache
def _rule(name: str) -> Rule:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@lru_cache(maxsize=256)
def _check_gold(rule: str, gold: str | None, options: str) -> None:
    _rule(rule).check_gold(gold, **json.loads(options))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of stdin and stdout; what libraries print goes nowhere."""
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    return jobs, replies


def _say(replies: BinaryIO, reply: dict[str, Any]) -> None:
    try:
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
    except OSError:
        os._exit(0)  # nobody listens any more


def _leave_with(parent: int) -> None:
    """End with the parent, even when a copy of it still holds the other end of our pipe."""
    with contextlib.suppress(Exception):
        while os.getppid() == parent:
            time.sleep(ORPHAN_S)
    os._exit(0)


if __name__ == "__main__":
    main()
