"""What can be seen without a GPU of how a run behaves on one: what it would wait for, what it would add in any order,
what it takes of its memory, and which shapes and kernels it decides for."""

import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_online
import torch
from test_resume import settings, start
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import posttrain
from posttrain import batch, scoring
from posttrain.batch import Example, Node, Pack, pack, sum_segments
from posttrain.config import load
from posttrain.config.schema.training import DevicesConfig
from posttrain.engines.cache import Room, token_bytes
from posttrain.models import graphs
from posttrain.models.devices import determinism
from posttrain.models.load import load_config
from posttrain.parallel.ranks import ALONE
from posttrain.planning import estimate as estimates
from posttrain.planning import largest
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import checkpoints_gradients, estimate
from posttrain.planning.largest import with_room
from posttrain.planning.plan import plan
from posttrain.recipes.online import evaluate
from posttrain.sampler import Sampler
from posttrain.training import loop

GPU = torch.device("cuda", 0)
PACKAGE = str(Path(posttrain.__file__).parent)
# A GPU is waited for where these are asked of tensors on it: how many there are, or what one is.
WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "bincount", "masked_select"}
# And adds here in whatever order its threads come.
ANY_ORDER = {"index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "put_", "_index_put_impl_"}


class Recording(TorchDispatchMode):
    """The operations of both kinds, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        by_mask = name in ("index", "index_put_") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        adds = name in ANY_ORDER and args[0].is_floating_point()
        if name in WAITS or adds or by_mask:
            ours = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
            if not ours or ours[-1].name != "sum_segments":  # which looks at its arguments on a CPU alone
                self.found.append(f"{name}{' by a mask' if by_mask else ''} at {ours[-1] if ours else 'backward'}")
        return func(*args, **(kwargs or {}))


def watch_lists(monkeypatch, recorded: Recording) -> None:
    """Record too where a tensor of a pack that was moved is read as a list, which no dispatch mode sees."""
    to, tolist = Pack.to, torch.Tensor.tolist
    moved: list[Pack] = []

    def to_a_gpu(pack, device):
        copied = {name: x.clone() for name in Pack.__slots__ if torch.is_tensor(x := getattr(pack, name))}
        moved.append(to(replace(pack, **copied), device))
        return moved[-1]

    def read(tensor):
        storage = tensor.untyped_storage().data_ptr()
        theirs = (getattr(pack, name) for pack in moved for name in Pack.__slots__)
        if any(torch.is_tensor(x) and x.untyped_storage().data_ptr() == storage for x in theirs):
            recorded.found.append(f"tolist at {traceback.extract_stack()[-2]}")
        return tolist(tensor)

    monkeypatch.setattr(Pack, "to", to_a_gpu)
    monkeypatch.setattr(torch.Tensor, "tolist", read)


OFFLINE = ["reward", "dpo", "dpo with known reference", "kto", "orpo"]  # of SFT and CPO there is nothing else
ONLINE = {
    "grpo": {"beta": 0.05, "num_iterations": 2},
    "gspo": {"loss_type": "gspo", "num_iterations": 2},
    "ppo": {"type": "ppo", "num_ppo_epochs": 2},
}


@pytest.mark.parametrize("method", [*OFFLINE, *ONLINE])
def test_packs_are_computed_without_waiting_and_in_one_order(
    tmp_path, shared, scratch_model, sums_home, monkeypatch, method
):
    """Forward and backward of every pack of a later step: the losses as the recipes call them."""
    monkeypatch.setattr(scoring, "SHARED", 0)  # equal predictions are looked for on a CPU only
    update, recorded, packs_seen = loop.update, Recording(), []
    watch_lists(monkeypatch, recorded)

    def recording(packs, objective, optimizer, rate, ranks, spare):
        packs = list(packs)
        packs_seen.append(len(packs))
        if len(packs_seen) > 1:  # the checks of the first one may wait
            with recorded:
                for pack in packs:
                    objective.of(pack)[0].backward()
            optimizer.forget()
        return update(packs, objective, optimizer, rate, ranks, spare)

    monkeypatch.setattr(loop, "update", recording)
    if method in ONLINE:
        data = {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24}
        test_online.train(sums_home, tmp_path, ONLINE[method], data=data, training={"max_steps": 2, "batch_size": 4})
    else:
        own = {"dpo with known reference": {"type": "dpo", "precompute_ref_log_probs": True}, "orpo": "orpo"}
        sections = settings(shared, scratch_model, "dpo" if method in own else method, max_steps=2)
        start(tmp_path, sections | ({"method": own[method]} if method in own else {}))
    assert len(packs_seen) > 1
    assert not recorded.found


def test_sums_of_neighbours():
    value = torch.randn(9, dtype=torch.float64, requires_grad=True)
    length = torch.tensor([3, 0, 5, 1])
    want = torch.stack([part.sum() for part in value.split(length.tolist())])
    torch.testing.assert_close(sum_segments(value, length), want)
    assert torch.autograd.gradcheck(lambda x: sum_segments(x, length), value)
    with pytest.raises(ValueError, match="lengths add up to 8, but there are 9 values"):
        sum_segments(value, torch.tensor([3, 5]))


def test_sums_of_neighbours_where_pytorch_has_none(monkeypatch):
    """As on an Apple GPU."""
    monkeypatch.setattr(batch, "HAVE_SEGMENTS", ())
    monkeypatch.setattr(torch, "segment_reduce", None)
    value, length = torch.arange(9.0), torch.tensor([3, 0, 5, 1])
    assert sum_segments(value, length).tolist() == [3, 0, 25, 8]


def test_an_evaluation_keeps_no_memory():
    """It may sample more at a time than a step, for which the estimate has room beside an update."""
    released = []
    sample = SimpleNamespace(evaluation={}, engine=SimpleNamespace(release=lambda: released.append(True)))
    loop_of = SimpleNamespace(evaluate_by=lambda measure: released.clear())
    evaluate(loop_of, sample, None)  # pyright: ignore[reportArgumentType]
    assert released == [True]


def test_deterministic_algorithms_while_a_run_lasts(tmp_path, shared, scratch_model, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen, update = [], loop.update
    monkeypatch.setattr(
        loop, "update", lambda *given: seen.append(torch.are_deterministic_algorithms_enabled()) or update(*given)
    )
    sections = settings(shared, scratch_model, "dpo", max_steps=1)
    start(tmp_path, sections | {"devices": {"type": "cpu", "full_determinism": True}})
    assert seen == [True] and not torch.are_deterministic_algorithms_enabled()
    with determinism(DevicesConfig(type="cpu")):
        assert not torch.are_deterministic_algorithms_enabled()


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """A GPU of so many bytes, as far as estimates ask for it."""

    def of(size: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=size))

    return of


def grpo(model, *more: str):
    given = [f"model.path={model}", "method.type=grpo", "data.source=x.jsonl", "data.template=none"]
    given += ["rewards=[{type: length, target: 20}]", "rollout.max_completion_length=300", "data.max_length=1024"]
    return load(None, [*given, "training.tokens_per_pack=2048", *more]).config


def estimated(config, device=GPU):
    prompt = Node([5] * 100, False, (Node([6] * 300, True),) * config.method.num_generations)
    packs = pack([Example((prompt,), 0)], 1 << 20)
    return estimate(config, config.models[0], empty_model(config, config.models[0]), packs, device)


def test_the_engines_memory_is_counted(scratch_model, card):
    """Kept beside an update where a GPU has room for both; else, and on a CPU, the larger of the two counts."""
    config = grpo(scratch_model, "training.gradient_checkpointing=true", "training.cuda_graphs=false")
    card(80 << 30)
    both = estimated(config)
    assert both.keeps_engine and both.parts["engine"] == both.engine
    card(int(both.peak / estimates.SAFE) - 1)
    short = estimated(config)
    resting = sum(size for part, size in both.parts.items() if part in ("weights", "optimizer"))
    assert not short.keeps_engine and short.parts["engine, between updates"] == short.engine
    assert max(short.engine, both.peak - both.engine - resting) == short.peak - resting
    on_cpu = estimated(config, torch.device("cpu"))
    settings, rows = load_config(config.models[0]), config.training.batch_size * config.method.num_generations
    room = Room.of(config.training.batch_size, config.method.num_generations, 100, 300, max_rows=512, tokens=1 << 30)
    assert room.rows == min(rows, 512)
    keys = room.tokens * token_bytes(settings, torch.float32, torch.device("cpu"))
    assert keys <= on_cpu.engine <= keys + (1 << 28) and not on_cpu.keeps_engine


def test_a_plan_names_the_engines_memory(sums_home, capsys):
    rows = [f"data.source={sums_home / 'train.jsonl'}", "data.max_length=24", "rollout.max_completion_length=6"]
    plan(grpo(sums_home / "model", *rows))
    assert "engine, between updates" in capsys.readouterr().out


def test_memory_is_given_back_before_updates_where_a_gpu_is_short_of_it(monkeypatch, caplog):
    """The decision, and what the sampler then does; the same completions come either way (test_embedded.py)."""
    job = SimpleNamespace(device=GPU, config=grpo("m"), model=None, ranks=ALONE, feeds_last=False)
    monkeypatch.setattr(largest, "FirstEpoch", lambda *given: SimpleNamespace(largest=lambda *sizes: []))
    monkeypatch.setattr(largest, "width_step", lambda *given: None)
    monkeypatch.setattr(largest, "empty_model", lambda *given: None)
    monkeypatch.setattr(largest, "replace", lambda job, **changes: changes)
    for keeps, captured in ((True, True), (True, False), (False, False)):
        found = SimpleNamespace(keeps_engine=keeps, captured=captured, engine=1)
        monkeypatch.setattr(largest, "estimate", lambda *given, ranks, found=found: found)
        assert with_room(job, None) == {"keeps_engine": keeps, "cuda_graphs": captured}  # pyright: ignore
    assert "no room for completions' keys and values" in caplog.text
    released = []
    engine = SimpleNamespace(release=lambda: released.append(True))
    for keeps in (True, False):
        sample = Sampler(engine, None, None, job.config.rollout, stop_token_ids=(), seed=0, keeps=keeps)  # pyright: ignore
        monkeypatch.setattr(sample, "_sample", lambda *given: "rollout", raising=False)
        assert sample(1, [], 2) == "rollout"
        assert released == [True] * (not keeps)


def test_cuda_graphs_by_the_estimate(scratch_model, card, monkeypatch):
    """On where gradients, activations and working memory fit beside one another, and beside the engine's memory."""
    monkeypatch.setattr(graphs, "NARROWEST", 1)  # the model's heads are narrower than FlexAttention's
    config = grpo(scratch_model, "training.gradient_checkpointing=true", "model.dtype=bfloat16")
    card(80 << 30)
    whole = estimated(config)
    assert whole.captured and whole.keeps_engine
    card(int(whole.peak / estimates.SAFE) - 1)
    short = estimated(config)
    assert not short.captured and short.keeps_engine and short.peak < whole.peak
    assert not estimated(grpo(scratch_model, "model.dtype=bfloat16", "training.cuda_graphs=false")).captured
    assert not estimated(config, torch.device("cpu")).captured


def test_gradient_checkpointing_by_the_estimate(scratch_model, card):
    """`auto`: off on a CPU; on a GPU on where a full pack would not fit safely without, whatever the data."""
    config = grpo(scratch_model)
    model = config.models[0]
    card(80 << 30)
    assert not checkpoints_gradients(config, model, GPU)
    assert not checkpoints_gradients(config, model, torch.device("cpu"))
    card(1 << 24)
    assert checkpoints_gradients(config, model, GPU)
    assert not checkpoints_gradients(config, model, torch.device("cpu"))
    for wanted in (True, False):
        asked = grpo(scratch_model, f"training.gradient_checkpointing={str(wanted).lower()}")
        assert checkpoints_gradients(asked, model, GPU) is wanted
    card(80 << 30)
    without = estimated(config).parts["activations"]
    card(1 << 24)
    assert estimated(config).parts["activations"] < without / 2
    assert estimates.SAFE < 1
