"""Graders that misbehave, or tell what a worker can do. Imported by grading workers, named in test_grading_pool.py."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from posttrain.grading.verdict import BadGold, Judgement, Rule


def any_gold(gold):
    if gold == "bad":
        raise BadGold("it is bad")
    if gold == "slow":
        time.sleep(60)


def rule(judge):
    return Rule(any_gold, judge)


def _hang(completion, gold):
    return Judgement(float(9 ** (9**9) > 0), True)  # holds the interpreter's lock all the while


def _sleep(completion, gold):
    time.sleep(float(completion))
    return Judgement(1.0, True, completion)


def _leave(completion, gold):
    os._exit(3)


def _fill(completion, gold):
    return Judgement(float(len(bytearray(2_000_000_000))), True)


def _fail(completion, gold):
    raise KeyError("no such thing")


def _talk(completion, gold):
    print('{"verdict": "correct", "score": 1.0, "extracted": null, "parts": {}}', flush=True)
    os.write(1, b'{"verdict": "correct", "score": 1.0}\n')
    return Judgement(0.0, False, completion)


def _probe(completion, gold):
    """What this process may do; `completion` is a port that listens."""

    def works(action):
        try:
            action()
        except (OSError, MemoryError):
            return False
        return True

    path = Path(sys.argv[0]).resolve().parent / "left_by_a_worker"
    found = {
        "environment": sorted(os.environ),
        "write": works(lambda: path.write_text("x")),
        "write_tmp": works(lambda: Path("/tmp/left_by_a_worker").write_text("x")),
        "connect": works(lambda: socket.create_connection(("127.0.0.1", int(completion)), timeout=2)),
        "program": works(lambda: subprocess.run([sys.executable, "-c", ""], check=True)),
        "gigabyte": works(lambda: bytearray(1_000_000_000)),
    }
    return Judgement(1.0, True, json.dumps(found))


HANG, SLEEP, LEAVE, FILL, FAIL, TALK, PROBE = map(rule, (_hang, _sleep, _leave, _fill, _fail, _talk, _probe))
NAN = rule(lambda completion, gold: Judgement(float("nan"), True))
TEXT = rule(lambda completion, gold: Judgement("1.0", True))
SILENT = rule(lambda completion, gold: None)
ALWAYS_ZERO = rule(lambda completion, gold: Judgement(0.0, False))
