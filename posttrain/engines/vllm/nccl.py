"""Weights from the trainer's GPU to a server's by NCCL: the tensors go from memory to memory, their names over HTTP.

The two sides form a communicator of two, by vLLM's PyNcclCommunicator: the trainer makes NCCL's unique id, and sends it
with the request to join, so that whoever may push weights may join and nobody else. The server loads each tensor as it
arrives. NCCL's calls cannot be interrupted: the trainer enqueues them on a stream of their own, and waits for that
stream no longer than the deadline, so that a run whose server has died can still be saved.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from posttrain.base.errors import ConfigError, EngineError, PosttrainError
from posttrain.base.imports import need
from posttrain.engines.vllm.weights import Named

TRAINER, SERVER, BOTH = 0, 1, 2  # ranks of the communicator, and their number
BEFORE_S = 0.05  # between two checks whether the tensors have left
Post = Callable[[Mapping[str, Any]], dict[str, Any]]


def _library() -> Any:
    """vLLM's binding of NCCL. Raises ConfigError without a GPU, vLLM, or NCCL."""
    if not torch.cuda.is_available():
        raise ConfigError("rollout.vllm.push: nccl needs a GPU here, and there is none: set push: http")
    need("vllm", "vllm", "rollout.vllm.push: nccl")
    try:
        return import_module("vllm.distributed.device_communicators.pynccl_wrapper").NCCLLibrary()
    except OSError as error:
        raise ConfigError(f"rollout.vllm.push: nccl needs the library NCCL: {error}; set push: http") from error


def _joined(unique_id: bytes, rank: int) -> Any:
    """The communicator. Returns when both sides have joined."""
    pynccl = import_module("vllm.distributed.device_communicators.pynccl")
    device = torch.device("cuda", torch.cuda.current_device())
    return pynccl.PyNcclCommunicator.from_unique_id_bytes(unique_id, rank, BOTH, device)


class Sender:
    """The trainer's side. `post` sends a body to the server's /nccl and returns its answer."""

    def __init__(self, post: Post, where: str, timeout: float):
        self._post, self._where, self._timeout = post, where, timeout
        library = _library()
        post({"check": True})  # what the server lacks is reported before anything waits for it
        unique_id = bytes(library.ncclGetUniqueId())
        with self._asking({"join": base64.b64encode(unique_id).decode()}) as answer:
            self._group = answer.while_waiting(lambda: _joined(unique_id, TRAINER))
        self._stream = torch.cuda.Stream()

    def send(self, mark: str, weights: Callable[[], Iterable[Named]]) -> dict[str, Any]:
        """Broadcast the weights; returns the server's answer. Raises EngineError if they do not leave in time."""
        # Adapters are merged twice, once for the shapes: no more than one merged layer is in memory at a time.
        described = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in weights()]
        with self._asking({"mark": mark, "tensors": described}) as answer:
            for _, tensor in weights():
                whole = tensor.detach().contiguous()
                self._stream.wait_stream(torch.cuda.current_stream())
                self._group.broadcast(whole, TRAINER, self._stream)
                whole.record_stream(self._stream)  # its memory is not reused before it has left
            sent = torch.cuda.Event()
            sent.record(self._stream)
            answer.until(sent.query)
        return answer.value

    def close(self) -> None:
        if hasattr(self, "_group"):
            self._group.destroy()

    def _asking(self, body: Mapping[str, Any]) -> _Answer:
        return _Answer(lambda: self._post(body), self._where, self._timeout)


class _Answer:
    """A request whose answer comes in another thread, while this one takes part in what it asks for."""

    def __init__(self, ask: Callable[[], dict[str, Any]], where: str, timeout: float):
        self._ask, self._where, self._timeout = ask, where, timeout
        self.value: dict[str, Any] = {}
        self._failed: PosttrainError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Answer:
        self._until = time.monotonic() + self._timeout
        self._thread.start()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.until(lambda: not self._thread.is_alive())
            self._raise()

    def _run(self) -> None:
        try:
            self.value = self._ask()
        except PosttrainError as error:
            self._failed = error

    def while_waiting(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, which may block, in a thread of its own."""
        found: list[Any] = []
        device = torch.cuda.current_device()

        def run() -> None:
            torch.cuda.set_device(device)
            found.append(work())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.until(lambda: not thread.is_alive())
        if not found:
            raise EngineError(f"{self._where} and this process could not connect by NCCL: set rollout.vllm.push: http")
        return found[0]

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait; raises the server's error, or EngineError after the deadline."""
        while not holds():
            self._raise()
            if time.monotonic() > self._until:
                raise EngineError(
                    f"{self._where} does not receive by NCCL within {self._timeout:g} s (rollout.vllm.timeout): set "
                    "rollout.vllm.push: http"
                )
            time.sleep(BEFORE_S)

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed


class Receiver:
    """The server's side."""

    def __init__(self) -> None:
        self._group: Any = None

    def check(self) -> None:
        _library()

    def join(self, unique_id: str) -> None:
        self.close()
        self._group = _joined(base64.b64decode(unique_id), SERVER)

    def tensors(self, described: Iterable[tuple[str, str, list[int]]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors as they arrive. Read all of them, whatever happens: the trainer waits for that."""
        if self._group is None:
            raise EngineError("the server has not joined a communicator of NCCL: it is another version of posttrain")
        for name, dtype, shape in described:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._group.device)
            self._group.broadcast(tensor, TRAINER)
            yield name, tensor

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None
