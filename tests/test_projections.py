"""Layers with the same input in one product, and LoRA within it: values, gradients, files, and all that PEFT can do."""

from contextlib import nullcontext
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from posttrain.batch import Example, Node, pack
from posttrain.models import lean as operations
from posttrain.models import matmul
from posttrain.models.attention import PackedMask
from posttrain.models.lean import Kernels, enable_gradient_checkpointing, lean
from posttrain.models.lora import save
from posttrain.models.matmul import apart, fuse, joined, packed_weights, place
from posttrain.scoring import Scorer

# Operations that launch nothing on a GPU.
FREE = {
    "t", "view", "_unsafe_view", "transpose", "slice", "split", "split_with_sizes", "as_strided", "expand", "unsqueeze",
    "squeeze", "detach", "alias", "select", "new_empty", "empty_like",
}  # fmt: skip


def model_of(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attention_bias=bias,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(dtype)
    model.set_attn_implementation("packed")
    lean(model)
    return model.eval()


def policies(dtype=torch.float32, bases=False, **settings):
    """The same policy twice, with the layers of PEFT and with ours; B is not 0."""
    made = []
    for fused in (False, True):
        lora = peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": "all-linear"} | settings)
        policy = peft.get_peft_model(model_of(dtype), lora, autocast_adapter_dtype=False)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name or name.endswith("bias"):
                nn.init.normal_(parameter, std=0.3)
        if fused:
            fuse(policy)
            place(policy, bases)
        made.append(policy.eval())
    return made


@pytest.fixture(scope="module")
def packed():
    leaf = Node(torch.randint(0, 99, (20,), generator=torch.Generator().manual_seed(1)).numpy(), True)
    [one] = pack([Example((Node([1, 2, 3], False, (leaf, Node(leaf.tokens[::-1].copy(), True))),), 0)], 1000)
    return one


def results(policy, pack):
    found = Scorer(policy)(pack).logprob_N
    found.sum().backward()
    grads = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return {"logprob": found.detach(), **grads}


def differences(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


def calls(monkeypatch):
    """The numbers of layers that are computed together."""
    made, outputs = [], matmul._outputs
    monkeypatch.setattr(matmul, "_outputs", lambda *given: made.append(len(given[2])) or outputs(*given))
    return made


@pytest.mark.parametrize("bases", [False, True])
@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "q_proj", "up_proj"]])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("onednn", [False, True])
def test_the_layers_are_pefts(packed, monkeypatch, rslora, onednn, targets, bases):
    monkeypatch.setattr(matmul, "ONEDNN", onednn and matmul.PACKS)
    monkeypatch.setattr(matmul, "SMALL", 1)
    made = calls(monkeypatch)
    theirs, ours = policies(bases=bases, use_rslora=rslora, target_modules=targets)
    layer = ours.get_base_model().model.layers[1].self_attn
    adapted = [part for part in (layer.q_proj, layer.k_proj, layer.v_proj) if hasattr(part, "lora_A")]
    assert joined([part.lora_A.default.weight for part in adapted]) is not None
    inner = [getattr(part, "base_layer", part).weight for part in (layer.q_proj, layer.k_proj, layer.v_proj)]
    assert (joined(inner) is not None) is bases and joined(inner[::-1]) is None
    assert differences(results(ours, packed), results(theirs, packed)) < 1e-5
    assert made == 2 * ([3, 1, 2, 1] if targets == "all-linear" else [3, 2])
    with torch.no_grad(), packed_weights(ours, ours.get_base_model().lm_head):
        found = Scorer(ours)(packed).logprob_N
    assert torch.allclose(found, results(theirs, packed)["logprob"], atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_trained_layers_with_the_same_input_are_one_product(packed, monkeypatch, bias):
    made, (theirs, ours) = calls(monkeypatch), (model_of(bias=bias) for _ in range(2))
    place(ours, bases=True)
    assert differences(results(ours, packed), results(theirs, packed)) < 1e-5
    assert made == [3, 2] * 2
    layer, x = ours.model.layers[0].self_attn, torch.randn(1, 7, 64)
    with torch.no_grad():
        found = matmul.project([layer.q_proj, layer.k_proj, layer.v_proj], x)
    for one, want in zip(found, (layer.q_proj, layer.k_proj, layer.v_proj), strict=True):
        torch.testing.assert_close(one, want(x))
    assert found[1].data_ptr() == found[0].data_ptr() + found[0].shape[-1] * 4  # columns of one tensor
    layer.k_proj.weight.data = layer.k_proj.weight.data.clone()  # it moves
    assert differences(results(ours, packed), results(theirs, packed)) < 1e-5
    assert made[5:] == [2, 3, 2]


@pytest.mark.parametrize("with_lora", [False, True])
def test_no_rows(with_lora):
    """As in the last layer, for a pack without targets."""
    model = policies(bases=True)[1].get_base_model() if with_lora else model_of()
    place(model, bases=True)
    mlp, x = model.model.layers[0].mlp, torch.empty(1, 0, 64, requires_grad=True)
    with torch.no_grad():
        assert mlp(x).shape == (1, 0, 64)
    mlp(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_hooks_see_every_layer(monkeypatch):
    made, model = calls(monkeypatch), model_of()
    place(model, bases=True)
    mlp, seen = model.model.layers[0].mlp, []
    mlp.up_proj.register_forward_hook(lambda module, given, output: seen.append(output))
    mlp(torch.randn(1, 3, 64))
    assert len(seen) == 1 and not made


def test_values_do_not_keep_queries_in_memory():
    """Without norms of queries and keys, attention saves the values but not the other columns of their product."""
    kept, config = [], LlamaConfig(
        vocab_size=9, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1,
    )  # fmt: skip
    [one] = pack([Example((Node([1] * 33, True),), 0)], 100)
    for bases in (False, True):
        model, saved = LlamaForCausalLM(config), []
        model.set_attn_implementation("packed")
        lean(model)
        place(model, bases)
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing):
            Scorer(model)(one)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        kept.append(sum(size for at, size in sizes.items() if at not in weights))
    assert kept[1] <= kept[0], kept


def test_gradients_that_are_not_needed(packed):
    """Of the input, with layers whose biases are trained; and of frozen adapters."""
    found = []
    for policy in policies(bias="lora_only"):
        layers = policy.get_base_model().model.layers[0].mlp
        x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
        sum(y.square().sum() for y in matmul.project([layers.gate_proj, layers.up_proj], x)).backward()
        grads = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}
        policy.requires_grad_(False)
        x.requires_grad_()
        sum(y.square().sum() for y in matmul.project([layers.gate_proj, layers.up_proj], x)).backward()
        found.append(grads | {"x": x.grad})
    assert differences(*found) < 1e-5 and len(found[0]) == 5


def test_placed_weights_are_saved_and_loaded(packed, tmp_path):
    [_, ours], whole = policies(bases=True), model_of()
    place(whole, bases=True)
    ours.save_pretrained(tmp_path / "adapter")
    state = apart(whole)
    assert state is not None and apart(model_of()) is None
    moved = [name for name, weight in state.items() if weight.untyped_storage().nbytes() == weight.nbytes]
    assert len(moved) == len(state)
    save(whole, tmp_path / "whole")
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
    loaded = peft.PeftModel.from_pretrained(model_of(), tmp_path / "adapter").eval()
    for (name, a), (other, b) in zip(loaded.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other and (torch.equal(a, b) or name.endswith("bias"))


def test_rounded_once(packed):
    """In bfloat16 the scaled product is not rounded before the sum, where PEFT rounds it twice."""
    x, errors = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(3)).bfloat16(), []
    for policy in policies(torch.bfloat16):
        layer = policy.get_base_model().model.layers[0].mlp.up_proj
        weight, A, B = (each.weight.double() for each in (layer.base_layer, layer.lora_A.default, layer.lora_B.default))
        inner = (x.double() @ A.T).bfloat16().double()
        errors.append(float((layer(x).double() - x.double() @ weight.T - 3 * inner @ B.T).norm()))
    assert errors[1] < 0.8 * errors[0]


class Counting(TorchDispatchMode):
    """Counts operations, and functions of `once` as one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] not in FREE
        return func(*args, **(kwargs or {}))

    def once(self, function):
        def counted(*given, **settings):
            self.count += 1
            with _disable_current_modes():
                return function(*given, **settings)

        return counted


class Attention(torch.autograd.Function):
    """A kernel forward and three backward, as attention over a pack has on a GPU."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(key, value)
        return query.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].clone(), *(torch.zeros_like(saved) for saved in ctx.saved_tensors)


def test_fewer_kernels_in_a_step_with_lora(packed, monkeypatch):
    """Operations of the layers of a GPU's step, forward, recomputed and backward, in which norms, rotations and gated
    MLPs are one kernel each. 25 % fewer is the goal."""
    monkeypatch.setattr(PackedMask, "attend", lambda self, module, *qkv: Attention.apply(*qkv[:3]))
    counts, counting = [], Counting()
    names = "rms_norm", "rms_norm_gradients", "rotate", "swiglu", "swiglu_gradients"
    chains = Kernels.of(SimpleNamespace(**{name: counting.once(getattr(operations, name)) for name in names}))
    for policy in policies(bases=True):
        lean(policy.get_base_model(), chains)
        enable_gradient_checkpointing(policy)
        fuse(policy) if counts else None
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        counting.count, backbone = 0, policy.get_base_model().model
        with counting:
            inputs = {"input_ids": packed.tokens_T[None], "position_ids": packed.position_T[None]}
            backbone(**inputs, use_cache=False, packed=PackedMask(packed)).last_hidden_state.sum().backward()
        counts.append(counting.count)
    print(counts)
    assert counts[1] <= 0.75 * counts[0], counts


@pytest.mark.parametrize("what", ["disabled", "merged", "dropout", "DoRA", "float32 adapters", "two adapters"])
def test_what_else_pefts_layers_do(packed, monkeypatch, what):
    settings = {"DoRA": {"use_dora": True}, "dropout": {"lora_dropout": 0.5}}.get(what, {})
    theirs, ours = policies(torch.bfloat16 if what == "float32 adapters" else torch.float32, **settings)
    made = calls(monkeypatch)
    with torch.no_grad():
        for policy in (theirs, ours):
            if what == "merged":
                policy.merge_adapter()
            elif what == "dropout":
                policy.train()
            elif what == "float32 adapters":
                for name, parameter in policy.named_parameters():
                    parameter.data = parameter.data.float() if "lora_" in name else parameter.data
            elif what == "two adapters":
                torch.manual_seed(1)
                policy.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
                policy.base_model.set_adapter(["default", "other"])
        found = []
        for policy in (theirs, ours):
            torch.manual_seed(2)
            with policy.disable_adapter() if what == "disabled" else nullcontext():
                found.append(Scorer(policy)(packed).logprob_N)
    assert torch.equal(*found)
    assert not made
