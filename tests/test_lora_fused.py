"""LoRA's products in one function are PEFT's: values, gradients, and what else PEFT's layers can do."""

from contextlib import nullcontext

import peft
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from posttrain.batch import Example, Node, pack
from posttrain.models import matmul
from posttrain.models.lean import lean
from posttrain.models.lora import fuse
from posttrain.models.matmul import packed_weights
from posttrain.scoring import Scorer

VIEWS = {
    "t",
    "view",
    "_unsafe_view",
    "transpose",
    "slice",
    "expand",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "select",
}


def policies(dtype=torch.float32, **settings):
    """The same policy twice, with the layers of PEFT and with ours; B is not 0."""
    made = []
    for fused in (False, True):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, attention_bias=True,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).to(dtype)
        model.set_attn_implementation("packed")
        lean(model)
        lora = peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": "all-linear"} | settings)
        policy = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name or name.endswith("bias"):
                nn.init.normal_(parameter, std=0.3)
        if fused:
            fuse(policy)
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
    made, low_rank = [], matmul.low_rank
    monkeypatch.setattr("posttrain.models.lora.low_rank", lambda *given: made.append(1) or low_rank(*given))
    return made


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("onednn", [False, True])
def test_the_layers_are_pefts(packed, monkeypatch, rslora, onednn):
    monkeypatch.setattr(matmul, "ONEDNN", onednn and matmul.PACKS)
    monkeypatch.setattr(matmul, "SMALL", 1)
    made = calls(monkeypatch)
    theirs, ours = policies(use_rslora=rslora)
    assert differences(results(ours, packed), results(theirs, packed)) < 1e-5
    assert len(made) == 14
    with torch.no_grad(), packed_weights(ours, ours.get_base_model().lm_head):
        found = Scorer(ours)(packed).logprob_N
    assert torch.allclose(found, results(theirs, packed)["logprob"], atol=1e-5)


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
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] not in VIEWS
        return func(*args, **(kwargs or {}))


def test_a_third_fewer_operations_in_the_layers(packed):
    counts = []
    for policy in policies():
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        layer, x = policy.get_base_model().model.layers[0].mlp.up_proj, torch.randn(1, 32, 64, requires_grad=True)
        with Counting() as counting:
            layer(x).sum().backward()
        counts.append(counting.count)
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
