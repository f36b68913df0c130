"""Which device a run computes on, as the settings say."""

import json

import pytest
import torch

from posttrain.base.errors import ModelError
from posttrain.cli import main
from posttrain.config import DevicesConfig
from posttrain.models.devices import device_of, own_device


@pytest.fixture
def gpus(monkeypatch):
    """Let PyTorch see so many GPUs."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return see


def test_the_best_there_is_or_the_one_named(gpus):
    gpus(0)
    assert device_of(DevicesConfig()) == device_of(DevicesConfig(type="cpu")) == torch.device("cpu")
    gpus(2)
    assert device_of(DevicesConfig()) == device_of(DevicesConfig(type="cuda")) == torch.device("cuda:0")
    assert (
        device_of(DevicesConfig(ids=(1,))) == device_of(DevicesConfig(type="cuda", ids=(1,))) == torch.device("cuda:1")
    )
    assert device_of(DevicesConfig(type="cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("count", "settings", "message"),
    [
        (0, {"type": "cuda"}, "PyTorch sees no GPU"),
        (0, {"type": "mps"}, "this machine has no MPS device"),
        (0, {"ids": (0,)}, "this run computes on cpu"),
        (2, {"ids": (2,)}, "names GPU 2, but PyTorch sees 2, numbered from 0"),
    ],
)
def test_missing_devices_are_reported(gpus, count, settings, message):
    gpus(count)
    with pytest.raises(ModelError, match=message):
        device_of(DevicesConfig(**settings))


def test_ranks_have_a_gpu_each_and_a_process_alone_the_first(gpus):
    gpus(4)
    two, visible = DevicesConfig(ids=(3, 1)), DevicesConfig()
    assert device_of(two) == torch.device("cuda:3"), "what is not training needs one"
    assert [own_device(two, rank, 2).ids for rank in range(2)] == [(3,), (1,)]
    assert [own_device(visible, rank, 8).ids for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert own_device(visible, 0, 1) is visible
    with pytest.raises(ModelError, match="there is no GPU for process 2 of this machine: start at most 2"):
        own_device(two, 2, 3)
    with pytest.raises(ModelError, match=r"names 2 GPUs, but this process trains on one.*launch --nproc 2"):
        own_device(two, 0, 1)


@pytest.mark.parametrize("ids", [None, 1])
@pytest.mark.parametrize("command", ["train", "generate", "score", "sample"])
def test_every_command_that_computes_takes_its_gpu(tmp_path, shared, gpus, monkeypatch, capsys, command, ids):
    """By its index, as PyTorch's own `set_device` and memory limits ask for one; the first where none is named."""

    class TakenError(Exception):
        pass

    def set_device(device: torch.device) -> None:
        raise TakenError(torch.cuda._utils._get_device_index(device, optional=False))  # as the real one begins

    gpus(2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    rows, model = tmp_path / "rows.jsonl", str(shared / "models/stories260K")
    rows.write_text('{"prompt": "Once", "completion": " upon"}\n')
    config = {"model": model, "data": {"source": str(rows)}, "output_dir": str(tmp_path / "runs"), "method": "sft"}
    config |= {} if ids is None else {"devices": {"ids": [ids]}}
    (tmp_path / "run.json").write_text(json.dumps(config))
    arguments = {
        "train": [str(tmp_path / "run.json")],
        "generate": [model, str(rows), "--output", str(tmp_path / "out.jsonl")],
        "score": [model, str(rows), "--output", str(tmp_path / "out.jsonl")],
        "sample": [model, str(rows)],
    }[command]
    if ids is not None and command != "train":
        arguments += ["--device", f"cuda:{ids}"]
    main([command, *arguments])
    assert f"TakenError: {ids or 0} " in capsys.readouterr().err


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0"])
def test_a_device_that_is_none(capsys, device):
    assert main(["score", "model", "rows.jsonl", "--device", device]) == 2
    assert f"--device is '{device}': it must be one of auto, cpu" in capsys.readouterr().err
