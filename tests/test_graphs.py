"""CUDA graphs of a pack's passes, on a CPU: here a graph is a list of operations, which a replay repeats on the same
tensors. So whatever a graph would freeze (a shape, a number that Python has read, an address) is frozen here."""

import gc
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_online
import torch
from test_gpu_path import Recording, grpo
from test_nodes import dense_varlen
from test_resume import assert_same_run, settings, start
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from posttrain import scoring
from posttrain.batch import Example, Node, pack
from posttrain.models import attention, graphs, nodes
from posttrain.models.attention import PackedMask
from posttrain.models.graphs import PackGraphs, padded, without_graphs
from posttrain.models.lean import lean
from posttrain.optim.adamw import AdamW
from posttrain.runner import one
from posttrain.scoring import Scorer
from posttrain.training import job

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Listed:
    """A CUDA graph's stand-in."""

    def __init__(self):
        self.operations = []

    def pool(self):
        return None

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, found in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


class Capturing(TorchDispatchMode):
    def __init__(self, listed: Listed):
        super().__init__()
        self.listed = listed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.startswith("_local_scalar_dense"):
            raise RuntimeError("a number was read while a graph was captured")
        found = func(*args, **(kwargs or {}))
        aliases = [each.alias_info for each in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):  # a view needs no repetition
            self.listed.operations.append((func, args, kwargs or {}, found))
        return found


def listed(run, others):
    """`graphs.capture` on a CPU."""
    graph = Listed()
    with Capturing(graph):
        result = run()
    return graph, result


def attend(self, module, query, key, value, how):
    """One operation over the whole pack with a mask that is computed on the device, as on a GPU."""
    mask = torch.where(self.dense(how.window), 0.0, -torch.inf).to(query.dtype)
    grouped = key.shape[1] != query.shape[1]
    return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=how.scaling, enable_gqa=grouped)


@pytest.fixture
def made(monkeypatch):
    """Every PackGraphs that is made, where graphs are lists of operations and everything suits them."""
    found, init = [], PackGraphs.__init__

    def remembered(self, *given, **more):
        init(self, *given, **more)
        found.append(self)

    monkeypatch.setattr(PackGraphs, "__init__", remembered)
    monkeypatch.setattr(graphs, "capture", listed)
    monkeypatch.setattr(nodes, "STEP", 128)
    monkeypatch.setattr(job, "without_graphs", lambda *given: None)
    monkeypatch.setattr(one, "with_room", lambda job, data: replace(job, cuda_graphs=True))
    monkeypatch.setattr(PackedMask, "attend", attend)
    return found


@pytest.fixture
def over_paths(monkeypatch):
    """Attention over gathered paths, as by FlashAttention 4 on a GPU."""
    monkeypatch.setattr(attention, "has_flash_attention", lambda: True)
    monkeypatch.setattr(attention, "pays", lambda nodes: True)
    monkeypatch.setattr(attention, "HEADS", range(1, 65))
    monkeypatch.setattr(nodes, "flash_attention", lambda: dense_varlen)

    def over_its_paths(self, module, query, key, value, how):
        if self.paths is None:
            return attend(self, module, query, key, value, how)
        return self.paths.attend(query, key, value, how.scaling, how.window)

    monkeypatch.setattr(PackedMask, "attend", over_its_paths)


OFFLINE = {
    "sft": {},
    "sft with dropout": {"model": {"lora": {"r": 4, "dropout": 0.2}}},
    "dpo": {},
    "dpo with LoRA": {"model": {"lora": {"r": 4}}},
    "dpo, recomputed": {"training": {"gradient_checkpointing": True}},
    "dpo in bfloat16": {"model": {"dtype": "bfloat16"}},
    "dpo with muon": {"training": {"optimizer": "muon"}},
    "kto": {},
    "reward": {},
}
ONLINE = {
    "grpo": {"beta": 0.05, "num_iterations": 2},
    "grpo over paths": {"beta": 0.05},
    "ppo": {"type": "ppo", "num_ppo_epochs": 2},
    "distill": {"type": "distill"},
}


def run_of(what, folder, shared, scratch_model, sums_home, *overrides, **more):
    """A run of five steps, with few widths."""
    nodes.STEP = 256 if what in ONLINE else 1024  # `made` puts it back
    if what in ONLINE:
        method, training = dict(ONLINE[what]), {"max_steps": 4, "batch_size": 4}
        if what == "distill":
            method["teacher"] = str(sums_home / "model")
            overrides += ("rollout.max_completion_length=6",)
        data = {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24}
        rewards = {"rewards": []} if what == "distill" else {}
        return test_online.train(sums_home, folder, method, *overrides, data=data, training=training, **rewards, **more)
    sections = settings(shared, scratch_model, what.split()[0].strip(","), max_steps=5)
    sections["model"]["lora"] = None
    for name, changes in OFFLINE[what].items():
        sections[name] = sections[name] | changes
    sections["evaluation"] = {"eval_steps": -1}
    sections["checkpoint"] = {"save_steps": 2, "save_total_limit": None, "best_metric": None}
    del sections["data"]["validation"]
    sections["data"]["max_length"] = 250
    start(folder, sections, *overrides, **more)
    return folder / "run"


@pytest.mark.parametrize("what", [*OFFLINE, *ONLINE])
def test_a_run_with_replays_is_the_run_without(
    tmp_path, shared, scratch_model, sums_home, made, monkeypatch, request, what
):
    """To the bit: weights, optimizer, metrics; for every method, and for what changes a pass."""
    if "paths" in what:
        request.getfixturevalue("over_paths")
    given = shared, scratch_model, sums_home
    replayed = run_of(what, tmp_path / "replayed", *given)
    assert sum(each.replays for each in made) > 0 and not any(each.is_off for each in made)
    policy = next(each for each in made if each.kept)
    assert any(key.learns and bool(key.sizes) is ("paths" in what) for key in policy._passes)
    results = json.loads((replayed / "results.json").read_text())
    assert (results["replayed_passes"], results["eager_passes"]) == (policy.replays, policy.eager)
    monkeypatch.setattr(graphs, "MOST", 0)
    before = len(made)
    plain = run_of(what, tmp_path / "plain", *given)
    assert len(made) > before and not any(each.replays for each in made[before:])
    assert_same_run(replayed, plain)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, shared, scratch_model, sums_home, made, power_cut):
    """It starts with ordinary passes where the other replays."""
    given = shared, scratch_model, sums_home
    whole = run_of("dpo with LoRA", tmp_path / "whole", *given)
    with power_cut(step=5):
        run_of("dpo with LoRA", tmp_path / "broken", *given)
    broken = run_of("dpo with LoRA", tmp_path / "broken", *given, resume=True)
    assert sum(each.replays for each in made) > 0
    assert_same_run(whole, broken)


def test_dropout_with_recomputed_layers_is_never_captured(tmp_path, shared, scratch_model, sums_home, made):
    given = shared, scratch_model, sums_home
    run_of("sft with dropout", tmp_path, *given, "training.gradient_checkpointing=true")
    assert made and not any(each.replays for each in made)


# --- one model --------------------------------------------------------------------------------------------------------


def scorer_of(scratch_model, unused: nn.Parameter | None = None, **changes) -> tuple[Scorer, AdamW]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(scratch_model, **changes))
    model.set_attn_implementation("packed")
    lean(model)
    model.model.register_parameter("unused", unused)
    optimizer = AdamW(model, torch.bfloat16)
    masters = {optimizer.parameters[name]: master for name, master in optimizer.masters.items()}
    optimizer.graphs = PackGraphs(model, masters, eager_in_training=False)
    return Scorer(model), optimizer


def pack_of(seed: int, tokens: int = 100):
    ids = torch.randint(0, 90, (tokens,), generator=torch.Generator().manual_seed(seed)).numpy()
    tree = Node(ids[: tokens // 3], False, (Node(ids[tokens // 3 : tokens // 2], True), Node(ids[tokens // 2 :], True)))
    [packed] = pack([Example((tree,), 0)], 1 << 14)
    return packed


def gradients(scorer, optimizer, *packs):
    optimizer.prepare()
    for each in packs:
        scorer(each).logprob_N.sum().backward()
    found = {name: m.grad.clone() for name, m in optimizer.masters.items() if m.grad is not None}
    optimizer.forget()
    return found


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_added_where_they_were(scratch_model, made, monkeypatch, tied):
    """Several packs of two widths in a step, and other numbers in each: the sums are an ordinary pass's to the bit,
    those of embeddings that are the head's weight too."""
    monkeypatch.setattr(nodes, "STEP", 64)
    plain, other = scorer_of(scratch_model, tie_word_embeddings=tied)
    other.graphs.is_off = True
    scorer, optimizer = scorer_of(scratch_model, tie_word_embeddings=tied)
    assert bool(optimizer.graphs._outside) is tied
    places = None
    for step in range(4):
        packs = [pack_of(10 * step), pack_of(10 * step + 1, 180), pack_of(10 * step + 2)]
        assert_equal(gradients(scorer, optimizer, *packs), gradients(plain, other, *packs))
        now = [master.grad.data_ptr() for master in optimizer.graphs._masters if master in optimizer.graphs.kept]
        assert places is None or now == places
        places = now or None
    assert optimizer.graphs.replays == 0 + 2 + 3 + 3  # the longer pack is met once a step
    for name, master in optimizer.masters.items():
        assert master in optimizer.graphs.kept or master.grad is None, name
        assert master.grad is None or not master.grad.any()


def test_a_forward_pass_that_waits_for_its_backward_pass_keeps_its_memory(scratch_model, made):
    """A second pass with gradients before it runs as an ordinary one; a loss that is dropped waits no longer."""
    plain, other = scorer_of(scratch_model)
    other.graphs.is_off = True
    scorer, optimizer = scorer_of(scratch_model)
    for seed in range(2):
        gradients(scorer, optimizer, pack_of(seed))

    def together(scorer, optimizer):
        optimizer.prepare()
        losses = [scorer(pack_of(seed)).logprob_N.sum() for seed in (5, 6)]
        with torch.no_grad():
            scorer(pack_of(7))
        for loss in losses:
            loss.backward()
        return {name: m.grad.clone() for name, m in optimizer.masters.items() if m.grad is not None}

    got = together(scorer, optimizer)
    assert optimizer.graphs.replays == 1
    assert_equal(got, together(plain, other))
    optimizer.forget()
    kept = scorer(pack_of(8)).logprob_N.sum()
    assert optimizer.graphs._waits()
    del kept
    gc.collect()
    assert not optimizer.graphs._waits()


def test_a_second_backward_pass_is_refused(scratch_model, made):
    scorer, optimizer = scorer_of(scratch_model)
    for seed in range(2):
        gradients(scorer, optimizer, pack_of(seed))
    optimizer.prepare()
    loss = scorer(pack_of(3)).logprob_N.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a replayed pass has one backward pass"):
        loss.backward()


def test_weights_that_have_moved_are_captured_again(scratch_model, made):
    scorer, optimizer = scorer_of(scratch_model)
    with torch.no_grad():
        first = [scorer(pack_of(seed)).logprob_N for seed in (1, 1, 1)]
        assert optimizer.graphs.replays == 2
        weight = scorer.model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data * 2
        moved = [scorer(pack_of(seed)).logprob_N for seed in (1, 1, 1)]
    assert optimizer.graphs.replays == 4
    for found in (first, moved):
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(first[0], moved[0])


@pytest.mark.parametrize("fault", ["refused", "different", "no memory", "no memory in backward"])
def test_a_run_continues_without_graphs_if_they_fail(scratch_model, made, monkeypatch, caplog, fault):
    """With the gradients of ordinary passes, and no memory kept."""

    def without_memory(self, hidden_T, grad_T):  # as where a hook takes a gradient to its master
        self._trained[0].grad = torch.ones_like(self._trained[0])
        raise torch.OutOfMemoryError("CUDA out of memory")

    def failing(run, others):
        if fault == "refused":
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        if fault == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        graph, result = listed(run, others)
        graph.operations = graph.operations[:-1]
        return graph, result

    plain, other = scorer_of(scratch_model)
    other.graphs.is_off = True
    scorer, optimizer = scorer_of(scratch_model)
    monkeypatch.setattr(graphs, "capture", failing)
    if fault == "no memory in backward":
        monkeypatch.setattr(PackGraphs, "_backward", without_memory)
    for seed in range(4):
        packs = pack_of(seed), pack_of(seed + 9)
        assert_equal(gradients(scorer, optimizer, *packs), gradients(plain, other, *packs))
    assert optimizer.graphs.is_off and not optimizer.graphs.replays and not optimizer.graphs.kept
    assert all(master.grad is None for master in optimizer.masters.values())
    [line] = [each for each in caplog.messages if "CUDA graphs" in each]
    assert line.startswith("training continues without CUDA graphs: ") and "\n" not in line


def test_a_weight_without_a_gradient_gets_none(scratch_model, made):
    """AdamW would decay it."""
    scorer, optimizer = scorer_of(scratch_model, unused=nn.Parameter(torch.ones(3)))
    for seed in range(4):
        assert "model.unused" not in gradients(scorer, optimizer, pack_of(seed))
    assert optimizer.graphs.replays == 2


@pytest.mark.parametrize("attends", ["masked", "over paths"])
def test_a_replayed_pass_waits_for_nothing(scratch_model, made, monkeypatch, request, attends):
    """Nothing is read on the host between packs, and nothing is added in any order."""
    if attends == "over paths":
        request.getfixturevalue("over_paths")
    monkeypatch.setattr(scoring, "SHARED", 0)  # equal predictions are looked for on a CPU only
    scorer, optimizer = scorer_of(scratch_model)
    for seed in range(2):
        gradients(scorer, optimizer, pack_of(seed))
    optimizer.prepare()
    with Recording() as recorded:
        for seed in range(3):
            scorer(pack_of(seed)).logprob_N.sum().backward()
    assert optimizer.graphs.replays == 3 and not recorded.found


def test_a_wider_pass_comes_first(scratch_model, made, monkeypatch):
    """Later graphs fit into the memory of earlier ones, so narrower ones are captured again after it."""
    monkeypatch.setattr(nodes, "STEP", 64)
    captured, sizes = PackGraphs._captured, []
    monkeypatch.setattr(
        PackGraphs,
        "_captured",
        lambda self, pack, learns: sizes.append(len(pack.tokens_T)) or captured(self, pack, learns),
    )
    plain, other = scorer_of(scratch_model)
    other.graphs.is_off = True
    scorer, optimizer = scorer_of(scratch_model)
    for seed, tokens in enumerate((100, 100, 100, 180, 180, 180, 100)):
        one = pack_of(seed, tokens)
        assert_equal(gradients(scorer, optimizer, one), gradients(plain, other, one))
    assert sizes == [128, 192, 128] and optimizer.graphs.replays == 3


def test_a_pass_with_more_gathered_keys_comes_first(scratch_model, made, over_paths, monkeypatch):
    captured, sizes = PackGraphs._captured, []
    monkeypatch.setattr(
        PackGraphs,
        "_captured",
        lambda self, pack, learns: sizes.append(len(PackedMask(pack).paths.token_G)) or captured(self, pack, learns),
    )
    scorer, optimizer = scorer_of(scratch_model)
    for lengths in [(100, 60, 80)] * 3 + [(100, 60, 60, 30)] * 3:
        gradients(scorer, optimizer, tree_of(0, *lengths))
    assert sizes == [512, 640, 512]


def test_inference_mode_captures_nothing(scratch_model, made):
    """Its tensors could not be filled with another pack later."""
    scorer, optimizer = scorer_of(scratch_model)
    with torch.inference_mode():
        for seed in range(3):
            scorer(pack_of(seed))
    with torch.no_grad():
        for seed in range(3):
            scorer(pack_of(seed))
    assert optimizer.graphs.replays == 2


def test_few_widths():
    """Eight between one and its double; real tokens, their positions and what they see do not change."""
    widths = set()
    for tokens in range(6, 9000, 37):
        one = pack_of(0, tokens)
        wide = padded(one)
        size, width = len(one.tokens_T), len(wide.tokens_T)
        assert size <= width <= max(size + nodes.STEP, size * 9 / 8)
        widths.add(width)
        assert torch.equal(wide.tokens_T[:size], one.tokens_T) and torch.equal(wide.position_T[:size], one.position_T)
        assert torch.equal(wide.end_T[:size], one.end_T)
        assert torch.equal(wide.end_T[size:], torch.arange(size, width) + 1)
    assert len(widths) <= 8 + 8 * 3
    assert padded(wide).tokens_T is wide.tokens_T


def tree_of(seed: int, *lengths: int):
    """A prompt and its completions of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompt, *rest = (torch.randint(0, 90, (length,), generator=generator).numpy() for length in lengths)
    [packed] = pack([Example((Node(prompt, False, tuple(Node(ids, True) for ids in rest)),), 0)], 1 << 14)
    return packed


def test_paths_of_equal_sizes_share_a_graph(scratch_model, made, over_paths):
    """Other trees, in which other keys are gathered and other keys belong to no node: gradients are an ordinary pass's
    to the bit. A pack of other sizes is computed as usual, and counted."""
    plain, other = scorer_of(scratch_model)
    other.graphs.is_off = True
    scorer, optimizer = scorer_of(scratch_model)
    trees = [(100, 60, 80), (90, 70, 40), (70, 100, 80), (80, 2, 3, 90), (64, 10, 10, 10, 100)]
    places, gathered = set(), set()
    for step, lengths in enumerate(trees):
        whole = tree_of(step, *lengths)
        assert_equal(gradients(scorer, optimizer, whole), gradients(plain, other, whole))
        gathered.add(int(PackedMask(padded(whole)).paths.copies_T.sum()))
        places |= {made.paths.numbers.data_ptr() for made in optimizer.graphs._passes.values()}
    assert (optimizer.graphs.replays, optimizer.graphs.eager) == (3, 2) and len(places) == 1 and len(gathered) == 5
    [key] = optimizer.graphs._passes
    assert key == (256, (512, 16 + 1, 256), True, key.mode)
    others = {
        (256, 512, 17, 128): (60, 60, 60, 60), (256, 512, 17, 256): (100, 60, 80),
        (256, 512, 33, 128): (14, *[10] * 17), (256, 640, 17, 256): (100, 60, 60, 30),
        (384, 512, 17, 256): (20, 120, 125),
    }  # fmt: skip
    for sizes, lengths in others.items():
        for seed in range(3):
            whole = tree_of(seed, *lengths)
            assert_equal(gradients(scorer, optimizer, whole), gradients(plain, other, whole))
        assert sizes in {(key.width, *key.sizes) for key in optimizer.graphs._passes}
    assert (optimizer.graphs.replays, optimizer.graphs.eager) == (3 + 4 + 3, 2 + 4 * 2)


@pytest.mark.parametrize("heads, cap", [(range(1, 12), None), (range(1, 65), 30.0)])
def test_attention_that_is_not_over_paths_has_no_sizes(scratch_model, made, over_paths, monkeypatch, heads, cap):
    """Heads of other sizes, and capped logits."""
    monkeypatch.setattr(attention, "HEADS", heads)
    monkeypatch.setattr(Qwen3Config, "attn_logit_softcapping", cap, raising=False)
    monkeypatch.setattr(PackedMask, "attend", attend)
    scorer, optimizer = scorer_of(scratch_model)
    for seed in range(3):
        gradients(scorer, optimizer, tree_of(seed, 100, 60, 80))
    assert {key.sizes for key in optimizer.graphs._passes} == {()}


def test_other_passes_are_replayed_if_those_over_paths_cannot_be(scratch_model, made, over_paths, monkeypatch, caplog):
    """Whichever is captured first."""
    monkeypatch.setattr(attention, "pays", lambda nodes: any(node.before for node in nodes))
    plain, other = scorer_of(scratch_model)
    other.graphs.is_off = True
    scorer, optimizer = scorer_of(scratch_model)

    def failing(run, others):
        def refused(*given, **more):
            raise RuntimeError("not while a graph is captured")

        with monkeypatch.context() as during:
            during.setattr(nodes, "flash_attention", lambda: refused)
            return listed(run, others)

    monkeypatch.setattr(graphs, "capture", failing)
    for step in range(6):
        packs = [tree_of(step, 100, 60, 80), tree_of(step, 0, 150), tree_of(step, 0, 300)]
        assert_equal(gradients(scorer, optimizer, *packs), gradients(plain, other, *packs))
    [line] = [each for each in caplog.messages if "CUDA graphs" in each]
    assert line == "training continues without CUDA graphs of FlashAttention 4: not while a graph is captured"
    assert not optimizer.graphs.is_off and {key.sizes for key in optimizer.graphs._passes} == {()}
    assert optimizer.graphs.replays == 2 * 2


def test_only_so_many_passes_are_captured(scratch_model, made, over_paths, monkeypatch):
    """Of each kind; and no more packs are kept for later."""
    monkeypatch.setattr(attention, "pays", lambda nodes: any(node.before for node in nodes))
    monkeypatch.setattr(graphs, "MOST", 2)
    monkeypatch.setattr(nodes, "STEP", 64)
    scorer, _ = scorer_of(scratch_model)
    with torch.no_grad():
        for tokens in (60, 60, 120, 120, 180, 180, 240, 240):
            scorer(tree_of(tokens, tokens, tokens, tokens))
            scorer(tree_of(tokens, 0, tokens))
    assert [bool(key.sizes) for key in made[0]._passes] == [True, False] * 2
    assert not made[0]._met


@pytest.mark.parametrize("widths", [(250, 180, 120, 60), (60, 120, 180, 250)])
@pytest.mark.parametrize("learns", [True, False])
def test_passes_share_the_memory_of_their_results(scratch_model, made, monkeypatch, learns, widths):
    """If the widest comes last, those without gradients have at most twice the memory of one."""
    monkeypatch.setattr(nodes, "STEP", 64)
    scorer, optimizer = scorer_of(scratch_model)
    for seed in range(3):
        for tokens in widths:
            optimizer.prepare()
            with torch.set_grad_enabled(learns):
                scores = scorer(pack_of(seed, tokens))
            if learns:
                scores.logprob_N.sum().backward()
            optimizer.forget()
    of_passes = list(optimizer.graphs._passes.values())
    places = {made.hidden_T.untyped_storage().data_ptr() for made in of_passes}
    assert len(of_passes) == 4 and len(places) == (1 if learns or widths[0] == 250 else 3)
    assert not learns or len({made.grad_T.data_ptr() for made in of_passes}) == 1


def test_a_gradient_that_is_not_finite_does_not_stop_later_captures(scratch_model, made):
    """Those of embeddings that are the head's weight too stay where they were until the next pass."""
    scorer, optimizer = scorer_of(scratch_model, tie_word_embeddings=True)
    for seed in range(3):
        optimizer.prepare()
        (scorer(pack_of(seed)).logprob_N.sum() * torch.nan).backward()
        optimizer.forget()
    with torch.no_grad():
        for seed in range(3):
            scorer(pack_of(seed))
    assert not optimizer.graphs.is_off and len(optimizer.graphs._passes) == 2


# --- where there are none ---------------------------------------------------------------------------------------------


def test_what_rules_graphs_out(scratch_model, monkeypatch):
    monkeypatch.setattr(graphs, "lacking_for_triton", lambda: None)
    shape = AutoConfig.for_model("qwen3", head_dim=64)

    def of(*overrides, shape=shape, dtype=torch.bfloat16, device=GPU, ranks=1):
        return without_graphs(grpo(scratch_model, *overrides), shape, dtype, device, ranks)

    assert of() is None
    assert of(device=CPU) == "they need a GPU"
    assert of("training.cuda_graphs=false") == "training.cuda_graphs is false"
    assert of(ranks=2) == "there are several ranks"
    assert of("training.optimizer=adamw_cpu_offload") == "gradients are in CPU memory"
    assert of(dtype=torch.float32) == "attention runs without FlexAttention"
    narrow = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=8, head_dim=8)
    assert of(shape=narrow) == "heads of 8 are too narrow for FlexAttention"
    assert of("rollout.engine=vllm") == "vLLM needs their memory"
    assert of("model.new_tokens=[<a>]", "model.lora=true") == "LoRA trains new tokens"
    dynamic = AutoConfig.for_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert of(shape=dynamic) == "positions depend on the longest sequence"
    assert of(shape=AutoConfig.for_model("opt", layerdrop=0.1)) == "layers are dropped at random"
    assert of("model.attention=sdpa").endswith("are computed row by row")
    for kind, reason in {"bloom": "row by row", "qwen3_next": "recurrent layers", "mixtral": "experts"}.items():
        assert of(shape=AutoConfig.for_model(kind)).endswith(reason)


def test_nodes_are_never_captured(monkeypatch):
    """Attention by node, and recurrent layers, would have the nodes of the pack that was captured."""
    mask = PackedMask(pack_of(0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert mask.nodes
    mask = PackedMask(pack_of(0))
    mask.end_T = SimpleNamespace(is_cuda=True)
    with pytest.raises(RuntimeError, match="node by node"):
        _ = mask.nodes
