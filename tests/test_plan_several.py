"""A plan for several processes, on GPUs that are not here: shares of the memory, bytes that are exchanged."""

import math

import pytest
import torch

from benchmarks.gpu.shapes import CONFIGS
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config import load
from posttrain.optim.adamw import is_large
from posttrain.planning import CARDS
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import SAFE, Target, count, estimate, exchanged, gathered


@pytest.fixture(scope="module")
def of_7b(tmp_path_factory):
    """From a strategy and a number of processes to the estimate of a model of 7 billion weights on an H100."""
    folder = tmp_path_factory.mktemp("7B")
    CONFIGS["7B"].save_pretrained(folder)
    packs = pack([Example((Node([5] * 257, True),), 0)], 256)

    def made(strategy: str, ranks: int, **model):
        settings = {
            "model": {"path": str(folder), **model},
            "method": "sft",
            "data": {"source": "none.jsonl", "max_length": 256},
        }
        devices, training = {"strategy": strategy}, {"gradient_checkpointing": True, "tokens_per_pack": 256}
        config = load({**settings, "devices": devices, "training": training}).config
        target, empty = Target.of(config.devices, "h100", ranks), empty_model(config, config.models[0])
        found = estimate(config, config.models[0], empty, packs, target.device, card=target.card, ranks=ranks)
        return found, empty

    return made


def test_replicas_hold_everything_and_parts_a_share(of_7b):
    (alone, empty), (replica, _), (part, _) = of_7b("ddp", 1), of_7b("ddp", 8), of_7b("fsdp", 8)
    assert replica.parts == alone.parts and of_7b("fsdp", 1)[0].parts == alone.parts
    total, trained = count(empty)
    small = sum(p.numel() for p in empty.parameters() if not is_large(p))  # of the others, masters are kept in halves
    assert trained == total and alone.parts["weights"] == 2 * total
    assert alone.parts["optimizer"] == 10 * total + 2 * small and 0 < small < total / 1000
    assert [part.parts[name] for name in ("weights", "gradients", "optimizer")] == [total // 2, total // 2, total]
    assert part.parts["activations"] == alone.parts["activations"] and part.parts["logits"] == alone.parts["logits"]
    assert part.parts["gathered weights"] == gathered(empty, 2) < 2 * total / 4
    memory = CARDS["h100"] * 2**30
    assert alone.peak > memory and part.peak < SAFE * memory


def test_what_is_exchanged():
    """A ring's reduce-scatter and all-gather of float32 gradients; or weights twice and gradients once per pack."""
    assert exchanged(1000, 1000, 4, 2, 3, sharded=False) == 2 * 4000 / 2
    assert exchanged(1000, 10, 2, 8, 3, sharded=False) == 2 * 40 * 7 / 8
    assert exchanged(1000, 10, 2, 8, 3, sharded=True) == 3 * (2 * 2000 + 40) * 7 / 8
    assert exchanged(1000, 1000, 4, 1, 3, sharded=False) == exchanged(1000, 1000, 4, 1, 3, sharded=True) == 0


def test_the_command(shared, tmp_path, capsys):
    file = tmp_path / "a.json"
    file.write_text(
        f'{{"model": "{shared}/models/stories260K", "method": "sft", "name": "a", "output_dir": "{tmp_path}",'
        f'"data": {{"source": "{shared}/data/hh-harmless", "template": "none", "max_rows": 20}}}}'
    )
    assert main(["plan", str(file), "--nproc", "8", "--device", "h100", "--strategy", "fsdp"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "h100, bfloat16, 8 processes with parts of the weights" in shown and "fits: h100 has 79.2 GiB" in shown
    assert "gathered weights" in shown and "sent and received by each process" in shown and "not measured" in shown
    assert main(["plan", str(file), "--device", "h100", "devices.ids=[0, 1]", "--strategy", "fsdp"]) == 0
    assert "h100, bfloat16, 2 processes with parts of the weights" in " ".join(capsys.readouterr().out.split())
    for card, dtype, advised in (("t4", "auto", True), ("t4", "float16", False), ("l4", "auto", False)):
        assert main(["plan", str(file), "--device", card, f"model.dtype={dtype}"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("computes bfloat16 slowly" in shown and "set model.dtype=float16" in shown) == advised
        assert f"{card}, {'float16' if dtype == 'float16' else 'bfloat16'}" in shown
    assert main(["plan", str(file), "--device", "h1000"]) == 2 and "h100, h200" in capsys.readouterr().err
    for several in (["--nproc", "2"], ["devices.ids=[0, 1]"], ["--device", "h100"]):
        assert main(["plan", str(file), "--probe", *several]) == 2 and "real steps" in capsys.readouterr().err


def test_named_gpus_are_planned_for_as_they_are():
    target = Target.of(load({"model": "m", "method": "sft", "data": {"source": "a"}}).config.devices, "h200", 2)
    assert target.device == torch.device("cuda", 0) and math.isclose(target.card / 2**30, CARDS["h200"])
