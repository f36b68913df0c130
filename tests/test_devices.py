"""Which device a run computes on, as the settings say."""

import pytest
import torch

from posttrain.config import DevicesConfig
from posttrain.errors import ModelError
from posttrain.models.load import device_of


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
    assert device_of(DevicesConfig()) == torch.device("cuda")
    assert (
        device_of(DevicesConfig(ids=(1,))) == device_of(DevicesConfig(type="cuda", ids=(1,))) == torch.device("cuda:1")
    )
    assert device_of(DevicesConfig(type="cpu")) == torch.device("cpu")


@pytest.mark.parametrize(
    ("count", "settings", "message"),
    [
        (0, {"type": "cuda"}, "PyTorch sees no GPU"),
        (0, {"type": "mps"}, "this machine has none"),
        (0, {"ids": (0,)}, "this run computes on cpu"),
        (2, {"ids": (2,)}, "names GPU 2, and PyTorch sees 2, numbered from 0"),
        (2, {"ids": (0, 1)}, "names 2 GPUs, but one process trains on one.*--model-index"),
    ],
)
def test_what_is_not_there_is_said(gpus, count, settings, message):
    gpus(count)
    with pytest.raises(ModelError, match=message):
        device_of(DevicesConfig(**settings))
