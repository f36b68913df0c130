"""What is saved comes back bit for bit: JSON, tensors, random streams."""

import json
import math
import os
import random
from datetime import date
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.base.errors import RunError
from posttrain.runs.files import (
    load_json,
    load_tensors,
    ready_to_write,
    restore_rng,
    rng_state,
    save_json,
    save_rows,
    save_tensors,
)

CPU = torch.device("cpu")
TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(st.recursive(FINITE | TEXT | st.integers() | st.none() | st.booleans(), lambda x: st.lists(x, max_size=3)))
def test_json_round_trip_is_exact(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "x.json"
    save_json(path, {"value": value})
    assert repr(load_json(path)["value"]) == repr(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_refuses_what_is_not_finite_and_says_where(tmp_path, value):
    with pytest.raises(RunError, match=r"state.json: optimizer.groups\[1\].lr is"):
        save_json(tmp_path / "state.json", {"optimizer": {"groups": [{}, {"lr": value}]}})
    with pytest.raises(RunError, match="the key 3"):
        save_json(tmp_path / "state.json", {"steps": {3: "x"}})
    assert list(tmp_path.iterdir()) == []


def test_damaged_or_missing_files_are_named(tmp_path):
    (tmp_path / "bad.json").write_text('{"a": ')
    (tmp_path / "bad.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(RunError, match=r"bad.json is damaged"):
        load_json(tmp_path / "bad.json")
    with pytest.raises(RunError, match=r"none.json is missing"):
        load_json(tmp_path / "none.json")
    with pytest.raises(RunError, match=r"bad.safetensors is damaged"):
        load_tensors(tmp_path / "bad.safetensors")
    with pytest.raises(RunError, match=r"none.safetensors is missing"):
        load_tensors(tmp_path / "none.safetensors")


def test_tensors_of_every_kind_come_back(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 8, generator=generator)
    tensors = {
        "whole": base,
        "tied": base,
        "transposed": base.T,
        "row": base[1],
        "strided": base[:, ::3],
        "expanded": base[:1].expand(4, 8),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 5),
        "another empty": torch.zeros(0, 5),
        "parameter": torch.nn.Parameter(base[2:4]),
        "special": torch.tensor([math.nan, math.inf, -0.0, 1e-45]),
    }
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool):
        tensors[str(dtype)] = (base * 10).to(dtype)
    save_tensors(tmp_path / "x.safetensors", tensors)
    back = load_tensors(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape, name
        ours, theirs = tensor.detach().contiguous().reshape(-1), back[name].reshape(-1)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
    back["whole"].zero_()
    assert not torch.equal(back["tied"], back["whole"]), "loaded tensors must be independent"


def test_random_streams_go_on_where_they_were(tmp_path):
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(numpy.random.rand()),
            float(numpy.random.standard_normal()),
            torch.rand(()).item(),
            torch.randn(3).sum().item(),
        ]

    for seed in range(4):
        random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
        for _ in range(seed):
            draw()  # an odd number of draws leaves half of a gaussian pair behind
        tensors, facts = rng_state(CPU)
        save_tensors(tmp_path / "rng.safetensors", tensors | {"other": torch.zeros(1)})
        save_json(tmp_path / "rng.json", facts | {"other": 1})
        expected = [draw() for _ in range(3)]
        random.seed(99), numpy.random.seed(99), torch.manual_seed(99)
        assert draw() != expected[0]
        restore_rng(load_tensors(tmp_path / "rng.safetensors"), load_json(tmp_path / "rng.json"), CPU)
        assert [draw() for _ in range(3)] == expected


def test_random_state_that_cannot_be_restored_is_refused():
    tensors, facts = rng_state(CPU)
    with pytest.raises(RunError, match=r"the random state lacks rng\.numpy"):
        restore_rng({name: tensor for name, tensor in tensors.items() if name != "rng.numpy"}, facts, CPU)
    with pytest.raises(RunError, match="the random state is invalid"):
        restore_rng(tensors | {"rng.torch": tensors["rng.torch"][:9]}, facts, CPU)


def test_the_random_state_of_a_gpu_is_that_of_the_run_on_any_number_of_them(monkeypatch):
    """What is saved on one GPU is restored on another, or not at all on a CPU; also what earlier versions saved."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    states = {first: torch.arange(16, dtype=torch.uint8), second: torch.zeros(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    tensors, facts = rng_state(second)
    restore_rng(tensors, facts, first)
    assert not states[first].any()
    of_each = {f"rng.cuda.{number}": torch.full((16,), number, dtype=torch.uint8) for number in range(4)}
    restore_rng(rng_state(CPU)[0] | of_each, facts, second)
    assert (states[second] == 1).all() and not states[first].any()
    restore_rng(tensors, facts, CPU)
    assert "rng.cuda" in tensors and "rng.cuda" not in rng_state(CPU)[0]


def test_rows_of_any_data_set_are_written(tmp_path):
    """Types that JSON does not have become text; a lone surrogate reads back."""
    rows = [{"day": date(2024, 1, 2), "raw": b"x", "text": "Ren\udce9", "é": 1}]
    save_rows(tmp_path / "new/rows.jsonl", rows)
    (line,) = (tmp_path / "new/rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"day": "2024-01-02", "raw": "b'x'", "text": "Ren\udce9", "é": 1} and "é" in line


def test_what_cannot_be_written_is_told_before_the_work(tmp_path):
    ready_to_write(tmp_path / "new/rows.jsonl")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(RunError, match="it is a folder; give the name of a file"):
        ready_to_write(tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        ready_to_write(tmp_path / "file/rows.jsonl")
    with pytest.raises(RunError, match="file exists: replace it with --overwrite"):
        ready_to_write(tmp_path / "file")
    ready_to_write(tmp_path / "file", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


def test_what_is_read_is_never_written_to(tmp_path, monkeypatch):
    """By whatever name: the same path, another spelling of it, a symbolic or a hard link; also inside a folder."""
    monkeypatch.chdir(tmp_path)
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "model"
    rows.write_text("{}")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    Path("soft").symlink_to(rows)
    Path("hard").hardlink_to(rows)
    Path("dangling").symlink_to("nowhere")
    os.mkfifo("pipe")
    for name in ("rows.jsonl", "model/../rows.jsonl", "soft", "hard", "model/config.json"):
        with pytest.raises(RunError, match="it is an input file; give another one with --output"):
            ready_to_write(Path(name), (rows, folder), overwrite=True)
    with pytest.raises(RunError, match="dangling exists"):
        ready_to_write(Path("dangling"), (rows, folder))
    for name in ("pipe", "/dev/null"):
        with pytest.raises(RunError, match="it is not a regular file"):
            ready_to_write(Path(name), (rows, folder), overwrite=True)
    ready_to_write(Path("model/new.jsonl"), (rows, folder))
