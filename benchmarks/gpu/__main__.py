"""Run the kit on this machine's GPU: `python -m benchmarks.gpu right train generate learn soak` (no PART: all).

`tune` compares sizes of kernels and runs only if it is named. `--short` runs the most informative cases of `right`,
`train` and `generate` in twelve minutes.

A part takes at most `--minutes`; a case without enough time left is reported as `not run: time`. With `--continue`,
cases that FILE has are kept, and the rest are run. `--only` selects the cases whose name matches a regular expression.
The exit status is 1 if a check failed, or if a goal was missed on a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from benchmarks.gpu import generate, learn, right, soak, train, tune
from benchmarks.gpu.common import Book, CardLostError, Setup, is_bad, moved, run_part, table
from posttrain.config import DevicesConfig
from posttrain.models.devices import take_device

PARTS = {"right": right.cases, "train": train.cases, "generate": generate.cases, "learn": learn.cases}
PARTS |= {"soak": soak.cases, "tune": tune.cases}
# The cases of `--short` and the minutes of each part; the rest of the twelve is for loading and for models to be made.
SHORT = {
    "right": (
        re.compile("^replay = eager|^(packed = one by one|Triton = PyTorch), (qwen3|llama),|^masters|^resumed"),
        4.0,
    ),
    "train": (
        re.compile("^(sft|dpo|grpo) 0.6B (2k|8k)$|^grpo-lora 4B 8k$|^grpo-lora 4B 2k$|^(sft|dpo) .*beside TRL, padded"),
        6.0,
    ),
    "generate": (re.compile("^(copy|256 rows)$"), 1.5),
}
ROOT = Path(__file__).resolve().parents[2]
# Processes that a run starts also import posttrain, which may not be installed but only checked out here.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="tiny: for testing the kit itself")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu.json", metavar="FILE.json")
    parser.add_argument("--models", type=Path, default=ROOT / "build/gpu-models", help="folder of created models")
    parser.add_argument("--minutes", type=float, default=8.0, help="a part's budget")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="run only these cases")
    parser.add_argument("--short", action="store_true", help="the most informative cases, in twelve minutes")
    parser.add_argument("--continue", dest="going_on", action="store_true", help="keep the cases that FILE has")
    options = parser.parse_args(given)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part is called {', '.join(unknown)}: they are {', '.join(PARTS)}")
    setup = Setup(take_device(DevicesConfig(type=options.device)), options.size, options.models)
    if options.short and options.parts:
        parser.error("--short chooses the parts itself: leave PART or --short out")
    book, everything = Book(options.out), re.compile("")
    named = options.parts or [part for part in PARTS if part != "tune"]
    parts = SHORT if options.short else {part: (everything, options.minutes) for part in named}
    before = book.whole()
    if not options.going_on:
        for part in parts:
            book.write(part, setup, {})
    found: dict[str, dict[str, Any]] = {}
    try:
        for part, (chosen, minutes) in parts.items():
            cases = [c for c in PARTS[part](setup) if chosen.search(c.name) and options.only.search(c.name)]
            found[part] = run_part(part, cases, setup, book, minutes)
    except CardLostError as error:
        print(f"the card is lost to this process ({error}): continuing in a new one", flush=True)
        rest = [word for word in given if word != "--continue"]
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *rest, "--continue"])
    for part, results in found.items():
        print(f"\n{table(part, results)}")
    if changes := moved(before, found):
        print("\n".join(["", f"Moved since the earlier results in {options.out}:", *changes]))
    return int(any(is_bad(result) for results in found.values() for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
