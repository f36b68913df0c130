"""The protocol of client and server: JSON, and the bytes of tensors; no format that can run code.

    GET  /health     -> {protocol, vllm, mark}
    POST /model      {architecture, config, dtype, tokenizer, gpu_memory_utilization} -> {vocabulary, positions}
    POST /tensor     a tensor's bytes, with the header X-Tensor: {name, dtype, shape, crc32} -> {}
    POST /load       {mark, count}: the tensors sent before, by the same connection, are the weights -> {mark}
    POST /nccl       {check} or {join} -> {}; {mark, tensors: [[name, dtype, shape], ...]} -> {mark} (nccl.py)
    POST /generate   {mark, requests, sampling} -> a line {tokens} each second of work; finally a line {groups}

A failure is {error: {kind, message}}, where kind is a class of base.errors. Every answer except /generate's is
one JSON object. Requests are handled side by side, and need `Authorization: Bearer KEY` if a key is set.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from posttrain.base import errors
from posttrain.base.errors import EngineError, PosttrainError
from posttrain.engines.protocol import Request, Sampling
from posttrain.engines.vllm.core import RawCompletion

PROTOCOL = 2
KEY = "POSTTRAIN_SERVER_KEY"  # environment variable, on both sides
TENSOR_HEADER = "X-Tensor"


def tensor_to_wire(name: str, tensor: Tensor) -> tuple[str, memoryview]:
    """The header and the bytes."""
    # A copy: the storage of gathered weights is released afterwards, which numpy's view of it would prevent.
    whole = tensor.detach().to("cpu", copy=True).contiguous()
    data = memoryview(whole.flatten().view(torch.uint8).numpy().data)
    dtype = str(whole.dtype).removeprefix("torch.")
    return json.dumps({"name": name, "dtype": dtype, "shape": list(whole.shape), "crc32": zlib.crc32(data)}), data


def tensor_from_wire(header: str, data: bytearray) -> tuple[str, Tensor]:
    """Raises EngineError if the bytes differ from those that were sent."""
    facts = json.loads(header)
    if zlib.crc32(data) != facts["crc32"]:
        raise EngineError(f"the weight {facts['name']} arrived damaged: its checksum differs")
    flat = torch.frombuffer(data, dtype=getattr(torch, facts["dtype"])) if data else torch.empty(0)
    return facts["name"], flat.view(facts["shape"])


def question(mark: str, asked: Sequence[Request], sampling: Sampling) -> dict[str, Any]:
    """The body of /generate."""
    rows = [{"tokens": list(r.tokens), "seed": r.seed, "limits": list(r.limits)} for r in asked]
    return {"mark": mark, "requests": rows, "sampling": asdict(sampling)}


def question_from(body: Mapping[str, Any]) -> tuple[str, list[Request], Sampling]:
    given: dict[str, Any] = dict(body["sampling"])
    given["stop_token_ids"], given["stop"] = tuple(given["stop_token_ids"]), tuple(given["stop"])
    sampling = Sampling(**given)
    rows = enumerate(body["requests"])
    return body["mark"], [Request(i, row["tokens"], row["seed"], tuple(row["limits"])) for i, row in rows], sampling


def answer(groups: Sequence[Sequence[RawCompletion]]) -> dict[str, Any]:
    """The last line of /generate."""
    return {"groups": [[asdict(one) for one in group] for group in groups]}


def answer_from(line: Mapping[str, Any]) -> list[list[RawCompletion]]:
    return [[RawCompletion(**one) for one in group] for group in line["groups"]]


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
