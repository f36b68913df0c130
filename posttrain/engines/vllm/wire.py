"""The protocol of client and server: JSON and the bytes of tensors, no format that can run code.

    GET  /health     -> {protocol, vllm, mark}
    POST /model      {architecture, config, dtype, tokenizer, gpu_memory_utilization} -> {vocabulary, positions}
    POST /tensor     a tensor's bytes, with the header X-Tensor: {name, dtype, shape, crc32} -> {}
    POST /load       {mark, count}: load the tensors that were sent over the same connection -> {mark}
    POST /nccl       {check} or {join} -> {}; {mark, tensors: [[name, dtype, shape], ...]} -> {mark}
    POST /generate   {mark, requests, sampling} -> a line {} for each second of work, finally a line {groups}

A failure is {error: {kind, message}}, where kind is a class of base.errors. Every answer, except to /generate, is one
JSON object. Requests are handled concurrently, and need `Authorization: Bearer KEY` if a key is set.

With NCCL, weights go directly from the trainer's GPU to the server's GPU, and only their names go over HTTP. The two
sides form a communicator of two with vLLM's PyNcclCommunicator. The trainer creates NCCL's unique id and sends it with
the request to join, so that only clients that may push weights can join. The server loads each tensor as it arrives.
NCCL's calls cannot be interrupted. So the trainer enqueues them on a separate stream and does not wait for that stream
beyond the deadline. A run whose server has died can therefore still be saved.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from posttrain.base import errors
from posttrain.base.errors import ConfigError, EngineError, PosttrainError
from posttrain.base.imports import need
from posttrain.base.signals import in_thread
from posttrain.engines.protocol import Request, Sampling
from posttrain.engines.vllm.core import RawCompletion

PROTOCOL = 2
KEY = "POSTTRAIN_SERVER_KEY"  # environment variable, on both sides
TENSOR_HEADER = "X-Tensor"
TRAINER, SERVER, BOTH = 0, 1, 2  # ranks of the communicator, and their number
CHECK_S = 0.05  # seconds between two checks whether the tensors were sent
Post = Callable[[Mapping[str, Any]], dict[str, Any]]
Named = tuple[str, Tensor]  # a weight with its name


def tensor_to_wire(name: str, tensor: Tensor) -> tuple[str, memoryview]:
    """Return the header and the bytes of a tensor."""
    # A copy, because the storage of gathered weights is released afterwards, and a numpy view would prevent that.
    whole = tensor.detach().to("cpu", copy=True).contiguous()
    data = memoryview(whole.flatten().view(torch.uint8).numpy().data)
    dtype = str(whole.dtype).removeprefix("torch.")
    return json.dumps({"name": name, "dtype": dtype, "shape": list(whole.shape), "crc32": zlib.crc32(data)}), data


def tensor_from_wire(header: str, data: bytearray) -> tuple[str, Tensor]:
    """Return the name and the tensor. Raises EngineError if the bytes differ from those that were sent."""
    facts = json.loads(header)
    if zlib.crc32(data) != facts["crc32"]:
        raise EngineError(f"the weight {facts['name']} arrived damaged: its checksum differs")
    flat = torch.frombuffer(data, dtype=getattr(torch, facts["dtype"])) if data else torch.empty(0)
    return facts["name"], flat.view(facts["shape"])


def question(mark: str, requests: Sequence[Request], sampling: Sampling) -> dict[str, Any]:
    """Return the body of a request to /generate."""
    rows = [{"tokens": list(r.tokens), "seed": r.seed, "limits": list(r.limits)} for r in requests]
    return {"mark": mark, "requests": rows, "sampling": asdict(sampling)}


def question_from(body: Mapping[str, Any]) -> tuple[str, list[Request], Sampling]:
    settings: dict[str, Any] = dict(body["sampling"])
    settings["stop_token_ids"], settings["stop"] = tuple(settings["stop_token_ids"]), tuple(settings["stop"])
    sampling = Sampling(**settings)
    rows = enumerate(body["requests"])
    return body["mark"], [Request(i, row["tokens"], row["seed"], tuple(row["limits"])) for i, row in rows], sampling


def answer(groups: Sequence[Sequence[RawCompletion]]) -> dict[str, Any]:
    """Return the last line of an answer from /generate."""
    return {"groups": [[asdict(completion) for completion in group] for group in groups]}


def answer_from(line: Mapping[str, Any]) -> list[list[RawCompletion]]:
    return [[RawCompletion(**facts) for facts in group] for group in line["groups"]]


def failure(error: Exception) -> dict[str, Any]:
    kind = type(error).__name__ if isinstance(error, PosttrainError) else "EngineError"
    message = str(error) if isinstance(error, PosttrainError) else f"{type(error).__name__}: {error}"
    return {"error": {"kind": kind, "message": message}}


def raise_failure(line: Mapping[str, Any], where: str) -> None:
    """Raise the server's error, if there is one."""
    if "error" in line:
        kind = getattr(errors, str(line["error"].get("kind")), EngineError)
        known = kind if isinstance(kind, type) and issubclass(kind, PosttrainError) else EngineError
        raise known(f"{where}: {line['error'].get('message')}")


def nccl_library() -> Any:
    """Return vLLM's binding of NCCL. Raises ConfigError without a GPU, vLLM, or NCCL."""
    if not torch.cuda.is_available():
        raise ConfigError("rollout.vllm.push: nccl needs a GPU here, but there is none: set push: http")
    need("vllm", "vllm", "rollout.vllm.push: nccl")
    try:
        return import_module("vllm.distributed.device_communicators.pynccl_wrapper").NCCLLibrary()
    except OSError as error:
        raise ConfigError(f"rollout.vllm.push: nccl needs the NCCL library: {error}; set push: http") from error


def _joined(unique_id: bytes, rank: int) -> Any:
    """Return the communicator as soon as both sides have joined."""
    pynccl = import_module("vllm.distributed.device_communicators.pynccl")
    device = torch.device("cuda", torch.cuda.current_device())
    return pynccl.PyNcclCommunicator.from_unique_id_bytes(unique_id, rank, BOTH, device)


class Sender:
    """The trainer's side of NCCL. `post` sends a body to the server's /nccl and returns its answer."""

    def __init__(self, post: Post, where: str, timeout: float):
        self._post, self._where, self._timeout = post, where, timeout
        library = nccl_library()
        post({"check": True})  # an error of the server is raised before anything waits for it
        unique_id = bytes(library.ncclGetUniqueId())
        with self._request({"join": base64.b64encode(unique_id).decode()}) as answer:
            self._group = answer.while_waiting(lambda: _joined(unique_id, TRAINER))
        self._stream = torch.cuda.Stream()

    def send(self, mark: str, weights: Callable[[], Iterable[Named]]) -> dict[str, Any]:
        """Broadcast the weights and return the server's answer. Raises EngineError if they are not sent in time."""
        # Adapters are merged twice, once for the shapes, so that only one merged layer is in memory at a time.
        described = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in weights()]
        with self._request({"mark": mark, "tensors": described}) as answer:
            for _, tensor in weights():
                whole = tensor.detach().contiguous()
                self._stream.wait_stream(torch.cuda.current_stream())
                self._group.broadcast(whole, TRAINER, self._stream)
                whole.record_stream(self._stream)  # its memory is not reused before it is sent
            sent = torch.cuda.Event()
            sent.record(self._stream)
            answer.until(sent.query)
        return answer.value

    def close(self) -> None:
        if hasattr(self, "_group"):
            self._group.destroy()

    def _request(self, body: Mapping[str, Any]) -> _Answer:
        return _Answer(lambda: self._post(body), self._where, self._timeout)


class _Answer(AbstractContextManager["_Answer"]):
    """A request that another thread sends, while this thread takes part in the exchange that the request starts."""

    def __init__(self, send: Callable[[], dict[str, Any]], where: str, timeout: float):
        self._where, self._timeout = where, timeout
        self._until = time.monotonic() + timeout
        self._sent = in_thread(send)

    @property
    def value(self) -> dict[str, Any]:
        return self._sent.result()

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.until(self._sent.done)
            self._sent.result()

    def while_waiting(self, work: Callable[[], Any]) -> Any:
        """Run `work`, which may block, in another thread, and return its result."""
        device = torch.cuda.current_device()

        def run() -> Any:
            torch.cuda.set_device(device)
            return work()

        working = in_thread(run)
        self.until(working.done)
        if error := working.exception():
            what = f"this process cannot connect to {self._where} by NCCL: set rollout.vllm.push: http"
            raise EngineError(what) from error
        return working.result()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()` is true. Raises the server's error, or EngineError after the deadline."""
        while not holds():
            if self._sent.done():
                self._sent.result()
            if time.monotonic() > self._until:
                raise EngineError(
                    f"{self._where} did not answer by NCCL within {self._timeout:g} s (rollout.vllm.timeout): set "
                    "rollout.vllm.push: http"
                )
            time.sleep(CHECK_S)


class Receiver:
    """The server's side of NCCL."""

    def __init__(self) -> None:
        self._group: Any = None

    def join(self, unique_id: str) -> None:
        self.close()
        self._group = _joined(base64.b64decode(unique_id), SERVER)

    def tensors(self, described: Iterable[tuple[str, str, list[int]]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as they arrive. Always read all of them, because the trainer waits for that."""
        if self._group is None:
            raise EngineError("the server has not joined an NCCL communicator: it runs another version of posttrain")
        for name, dtype, shape in described:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._group.device)
            self._group.broadcast(tensor, TRAINER)
            yield name, tensor

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None
