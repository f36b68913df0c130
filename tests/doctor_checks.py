"""Checks that misbehave, called in the doctor's helper processes; named in test_doctor.py."""

import ctypes
import json
import os
import time

from posttrain.doctor.checks import Broken, Found


def fine(text="it works"):
    return Found(text)


def process():
    return Found(str(os.getpid()))


def prints():
    print('{"state": "ok", "detail": "forged", "fix": ""}', flush=True)
    os.write(1, b'{"state": "ok", "detail": "forged", "fix": ""}\n')
    return Found("mine", "limited", "do this")


def segfault():
    return Found(str(ctypes.string_at(0)))


def leave():
    os.write(2, b"the disk is on fire\n")
    os._exit(3)


def hang():
    return Found(str(9 ** (9**9)))  # in C, with the interpreter's lock


def sleep():
    time.sleep(60)
    return Found("")


def fail():
    raise KeyError("no such thing")


def broken():
    raise Broken("it does not work", "turn it on")


def leave_quietly():
    raise SystemExit(0)


def leave_afterwards():
    """Ends the process when it announces the next check."""
    dumps = json.dumps
    json.dumps = lambda line: dumps(line) if "state" in line else os._exit(4)
    return Found("well")


def compiler():
    trace = 'Traceback (most recent call last):\n  File "/opt/x.py", line 7, in <module>\n    go()\nOSError: no gcc'
    raise RuntimeError(f"a kernel does not compile\n{trace}")
