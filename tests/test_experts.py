"""Mixture-of-experts models: what their routers choose, as metrics; and whole runs."""

import json

import pytest
import torch
from test_equivalence import forest, make

from benchmarks.models import write_model
from posttrain.batch import pack
from posttrain.cli import main
from posttrain.models.experts import RouterLoad
from posttrain.models.lean import lean
from posttrain.scoring import Scorer

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "qwen3_next"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_load_is_that_of_the_tokens_one_by_one(family):
    """A pack without shared prompts, padded: the padding counts for nothing, and forwards without gradients neither."""
    chains = [example for example in forest() if not any(tree.children for tree in example.trees)]
    model = make(family)
    model.set_attn_implementation("packed")
    if family == "qwen3_next":
        lean(model)  # forks its states; in other families it limits the last layer to what is read
    load = RouterLoad(model)
    assert load.take() == {}
    [whole] = pack(chains, 1000, pad_to=100)
    assert whole.num_tokens < 100
    with torch.no_grad():
        Scorer(model)(whole)
    assert load.take() == {}
    Scorer(model)(whole)
    found = load.take()
    assert load.take() == {}

    model.set_attn_implementation("eager")
    counts = 0
    for tree in (tree for example in chains for tree in example.trees):
        tokens = torch.tensor([tree.tokens[:-1]])  # a pack has no last token, which predicts nothing
        logits = model(input_ids=tokens, use_cache=False, output_router_logits=True).router_logits
        top = model.config.num_experts_per_tok
        counts = counts + torch.stack([
            torch.bincount(one.topk(top).indices.flatten(), minlength=one.shape[-1]) for one in logits
        ])  # fmt: skip
    assert counts.sum() == whole.num_tokens * top * len(logits)
    assert found["router/load_max"] == pytest.approx((counts.amax(1) / counts.double().mean(1)).mean().item())
    assert found["router/idle_experts"] == pytest.approx((counts == 0).double().mean().item())


@pytest.fixture(scope="module")
def hybrid_model(scratch_model, tmp_path_factory):
    """A Qwen3-Next with random weights: linear attention, full attention, and experts."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_model(
        folder, scratch_model, "qwen3_next", hidden_size=48, num_hidden_layers=2, intermediate_size=96,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        tie_word_embeddings=True,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("lora", ["null", "true"])
def test_a_hybrid_of_experts_trains_and_resumes(hybrid_model, shared, tmp_path, capsys, lora):
    """With gradient checkpointing; the step's metrics have the load. Online it samples with transformers' engine."""
    prompts = ["data.max_rows=6", "rewards=[{type: length, target: 9}]", "rollout.max_completion_length=6"]
    common = [f"model.path={hybrid_model}", f"model.lora={lora}", "training.batch_size=2", "training.max_steps=2",
              "tracking.logging_steps=1", "data.max_length=1024", f"output_dir={tmp_path}"]  # fmt: skip
    pairs = f"data.source={shared / 'data/preference-demo/dpo_en_demo.json'}"
    arguments = ["train", "method=dpo", pairs, "data.format=sharegpt", "data.max_rows=20", "name=dpo", *common]
    assert main([*arguments, "training.gradient_checkpointing=true"]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "dpo/metrics.jsonl").read_text().splitlines()]
    assert all(line["router/load_max"] >= 1 and 0 <= line["router/idle_experts"] < 1 for line in lines[:2])

    online = ["train", "method=grpo", "method.num_generations=2", f"data.source={shared / 'data/gsm8k/train.jsonl'}",
              "name=grpo", *prompts, *common]  # fmt: skip
    assert main(online) == 1
    assert "set rollout.engine: transformers" in capsys.readouterr().err
    assert main([*online, "rollout.engine=transformers", "name=other"]) == 0, capsys.readouterr().err
