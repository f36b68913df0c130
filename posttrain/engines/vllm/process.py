"""A vLLM server of our own: a process on this machine, which ends with this one."""

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from importlib.util import find_spec
from tempfile import TemporaryFile

from posttrain.base.errors import ConfigError, EngineError
from posttrain.base.extras import need
from posttrain.engines.vllm import wire

STOPPING = 3.0  # seconds that our own server has to end before it is killed
PROGRAM = ["-m", "posttrain.engines.vllm.server"]
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Process:
    """Our own server: on loopback, at any free port, with a key that only this process knows."""

    def __init__(self, timeout: float, gpu: int | None = None):
        if find_spec("vllm") is None:
            need("vllm", "vllm", "rollout.engine: vllm")
        self.key = secrets.token_hex(16)
        self.log = TemporaryFile()  # noqa: SIM115 (open as long as the server)
        self.process = subprocess.Popen(
            [sys.executable, *PROGRAM, "--port", "0", "--child", str(os.getpid())],
            stdin=subprocess.PIPE,  # when it closes, the server ends
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ | {wire.KEY: self.key} | _environment(gpu),
            start_new_session=True,  # Ctrl-C is for the trainer, which then stops it
        )
        try:
            self.url = self._listening(time.monotonic() + timeout, timeout)
        except BaseException:
            self.stop()
            raise

    def _listening(self, until: float, timeout: float) -> str:
        assert self.process.stdout is not None
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([self.process.stdout], [], [], min(left, 1.0))
            if ready:
                line = self.process.stdout.readline()
                if line.startswith(b'{"listening"'):
                    return json.loads(line)["listening"]
                if not line:
                    raise EngineError(f"the vLLM server did not start{self.last_words()}")
        raise EngineError(f"the vLLM server did not start within {timeout:g} s: raise rollout.vllm.timeout")

    def last_words(self) -> str:
        """Its exit status, if it has ended, and its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        status = self.process.poll()
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        ended = "" if status is None else f" (it ended with status {status})"
        return ended + (f": {lines[-1].strip()}" if lines else "")

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def _environment(gpu: int | None) -> dict[str, str]:
    """The variables of a process that sees only this GPU, of those that we see."""
    if gpu is None:
        return {}
    seen = os.environ.get(VISIBLE)
    names = seen.split(",") if seen else []
    if seen is not None and gpu >= len(names):
        raise ConfigError(f"rollout.vllm.gpus has {gpu}, and {VISIBLE} is {seen!r}: indices start at 0")
    return {VISIBLE: names[gpu] if names else str(gpu)}
