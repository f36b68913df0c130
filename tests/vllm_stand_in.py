"""What tests of the vLLM engine share: whether vLLM is there, what it refuses, and a server without it.

The stand-in is the real server over real HTTP, with a core that samples by the embedded engine from a model of its own,
whose weights are those that were pushed. So all but vLLM itself is tested wherever the suite runs. `Killable` puts a
process in front of one, whose death is that of a server.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from posttrain.base.errors import ModelError, VitalSignError
from posttrain.engines import EmbeddedEngine, TransformersEngine
from posttrain.engines.vllm import server
from posttrain.engines.vllm.core import RawCompletion
from posttrain.models.families import FAMILIES, positions_of
from posttrain.models.lean import lean

HAS_VLLM = find_spec("vllm") is not None
NO_VLLM = "vLLM is not installed here: run `make test-vllm`, which has it in an environment of its own"

# (engine, family) that vLLM 0.32 cannot run on a CPU, and what is said then.
VLLM_REFUSES = {
    **dict.fromkeys(
        [("vllm", family) for family in ("gpt_neox", "olmo2", "olmo3", "smollm3", "glm")],
        r"changes them in the whole process.*mode: server",
    ),
    **{
        (engine, family): refusal
        for engine in ("vllm", "vllm-server")
        for family, refusal in {
            "qwen2": r"Sliding window for some but all layers",
            "mixtral": r"does not take these weights: There is no module or parameter named 'layers.0.mlp'",
            **dict.fromkeys(("cohere2", "qwen2_moe", "qwen3_moe", "olmoe"), "does not serve the weights it was given"),
        }.items()
    },
}


PROXY = Path(__file__).with_name("vllm_proxy.py")


class Core:
    """In place of posttrain.engines.vllm.core.Core."""

    def __init__(self, config, architecture, dtype, *, gpu_memory_utilization, tokenizer=None):
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        assert type(self.model).__name__ == architecture
        packed = FAMILIES[config.model_type].packed
        if packed:
            self.model.set_attn_implementation("packed")
        lean(self.model)
        self.engine = (EmbeddedEngine if packed else TransformersEngine)(self.model, tokenizer)
        self.mark, self.vocabulary = "", config.vocab_size
        self.positions = positions_of(config) or 4096

    def load(self, mark, weights):
        self.mark = ""
        weights = dict(weights)
        own = dict(self.model.named_parameters())
        if own.keys() != weights.keys():
            raise ModelError(f"other weights than the model's: {sorted(own.keys() ^ weights.keys())[:3]}")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self.mark = mark

    def generate(self, mark, asked, sampling, tick=lambda: None):
        if mark != self.mark:
            raise VitalSignError(f"vLLM holds different weights ({self.mark}) from those requested ({mark})")
        tick()
        groups = self.engine.generate(
            [request.tokens for request in asked],
            replace(sampling, num_generations=len(asked[0].limits)),
            seeds=[request.seed for request in asked],
            limits=[request.limits for request in asked],
        )
        return [[RawCompletion(c.tokens, c.logprobs, c.finish_reason == "stop") for c in group] for group in groups]

    def close(self):
        pass


class Desk(server.Desk):
    """Counts what it is asked, and calls `during` when it samples for training."""

    def __init__(self):
        super().__init__("0.32.0", 0.7)
        self.loads, self.prompts, self.starts = [], [], 0
        self.during = lambda: None

    def load(self, body, arrived):
        self.loads.append(body["mark"])
        return super().load(body, arrived)

    def generate(self, body, tick):
        if len(body["requests"]) > 1:  # not the probe
            self.prompts.append(len(body["requests"]))
            self.during()
        return super().generate(body, tick)

    def forget(self):
        """As a server that has just started."""
        self.core, self.starts = None, self.starts + 1
        return {}


class Handler(server.Handler):
    def do_POST(self):
        if self.path == "/forget":
            self.rfile.read(2)
            self._answer(self.desk.forget)
            self.close_connection = True
        else:
            super().do_POST()


class Killable:
    """A stand-in behind a process of its own, at a fixed address."""

    def __init__(self, backing, port=0):
        self.backing, self.port, self.kills = backing, port, 0
        self.start()

    def start(self):
        command = [sys.executable, str(PROXY), "--port", str(self.port)]
        environment = os.environ | {"BACKING": self.backing.removeprefix("http://")}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.url = json.loads(self.process.stdout.readline())["listening"]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self):
        self.kills += 1
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def killable(desk=None):
    """A desk and the process in front of it."""
    desk = desk or Desk()
    with standing_in(desk) as url:
        one = Killable(url)
        try:
            yield desk, one
        finally:
            one.kill()


@contextmanager
def standing_in(desk=None, key=None, patched=Core):
    """The address of a server in a thread of this process, on loopback."""
    real, server.Core = server.Core, patched
    handler, server.Handler = server.Handler, Handler if isinstance(desk, Desk) else server.Handler
    bound = server.server_at("127.0.0.1", 0, key, desk or server.Desk("0.32.0", 0.7))
    thread = threading.Thread(target=bound.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.server_address[1]}"
    finally:
        bound.shutdown()
        bound.server_close()
        server.Core, server.Handler = real, handler
