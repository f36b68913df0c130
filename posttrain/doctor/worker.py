"""A process that runs checks one after the other: `python -m posttrain.doctor.worker`.

It reads one line from stdin, a JSON list of `[target, arguments]`, and writes a line per check to stdout when it starts
and when it ends:

    {"started": 0}
    {"state": …, "detail": …, "mend": …}

Whatever a check or a library prints goes to stderr, with the place of a crash. It ends when its stdin is closed.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from typing import Any

from posttrain.base.errors import reason_of
from posttrain.doctor.checks import Broken, Found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    faulthandler.enable(all_threads=False)
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    asked = json.loads(jobs.readline())
    threading.Thread(target=lambda: (jobs.read(), os._exit(0)), daemon=True).start()

    def reply(line: dict[str, Any]) -> None:
        replies.write(json.dumps(line) + "\n")
        replies.flush()

    for number, (target, arguments) in enumerate(asked):
        reply({"started": number})
        reply(answer(target, arguments))
    os._exit(0)  # without the exit handlers of what was imported, which may hang


def answer(target: str, arguments: list[str]) -> dict[str, Any]:
    """What a check has found, as JSON. An exception, whatever it is, is the finding that the part is broken."""
    module, _, function = target.partition(":")
    try:
        return asdict(getattr(importlib.import_module(module), function)(*arguments))
    except Broken as error:
        return asdict(Found(str(error), "broken", error.mend))
    except BaseException as error:
        return asdict(Found(reason_of(error), "broken"))


if __name__ == "__main__":
    sys.exit(main())
