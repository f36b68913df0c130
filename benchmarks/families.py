"""Small models of every family and a forest of trees, for the oracles of the tests and of the GPU kit.

Weights are scaled up after random initialisation, so that attention is far from uniform and capping matters: with
the usual small initialisation a wrong mask hides below the tolerance.
"""

from __future__ import annotations

import random

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from posttrain.batch import Example, Node

VOCAB = 61
SIZE = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=VOCAB)
GQA = SIZE | dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=128)
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1, mlp_only_layers=[])
HYBRID = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4,
)  # fmt: skip
GPT2 = dict(n_embd=32, n_layer=3, n_head=4, n_positions=128, vocab_size=VOCAB)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS = {
    "llama": GQA,
    "mistral": GQA | dict(sliding_window=7),
    "qwen2": SIZE | dict(num_key_value_heads=2, use_sliding_window=True, sliding_window=6, layer_types=LAYERS),
    "qwen3": GQA
    | dict(use_sliding_window=True, sliding_window=6, layer_types=LAYERS, max_window_layers=0, attention_bias=True),
    "gemma2": GQA | dict(sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, layer_types=LAYERS),
    "gemma3_text": GQA | dict(sliding_window=6, query_pre_attn_scalar=8, layer_types=LAYERS),
    "phi3": SIZE | dict(num_key_value_heads=2, sliding_window=9),
    "gpt2": GPT2,
    "gpt_neox": SIZE,
    "opt": SIZE | dict(ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128),
    "olmo2": GQA,
    "olmo3": GQA | dict(sliding_window=6, layer_types=LAYERS),
    "smollm3": GQA | dict(sliding_window=6, use_sliding_window=True, layer_types=LAYERS, no_rope_layers=[1, 0, 1]),
    "granite": GQA
    | dict(logits_scaling=1.5, embedding_multiplier=6.0, residual_multiplier=0.5, attention_multiplier=0.2),
    "glm": GQA | dict(partial_rotary_factor=0.5),
    "glm4": GQA | dict(partial_rotary_factor=0.5),
    "cohere": GQA | dict(logit_scale=0.4, use_qk_norm=True),
    "cohere2": GQA | dict(logit_scale=0.25, sliding_window=6, layer_types=LAYERS),
    "mixtral": GQA | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
    "qwen2_moe": GQA | MOE | dict(shared_expert_intermediate_size=24),
    "qwen3_moe": GQA | MOE | dict(norm_topk_prob=True),
    "olmoe": GQA | MOE,
    "qwen3_next": GQA | MOE | HYBRID | dict(shared_expert_intermediate_size=24),
    "qwen3_5_text": GQA | HYBRID,
    "bloom": dict(hidden_size=32, n_layer=3, n_head=4, vocab_size=VOCAB),
    "falcon": SIZE | dict(alibi=True, new_decoder_architecture=False),
    "gpt_neo": dict(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCAB,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
    ),
    "gptj": GPT2 | dict(rotary_dim=4),
}


def make(family: str, auto=AutoModelForCausalLM, **kwargs):
    """A small model whose attention is sharp: every matrix is several times its usual size."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(CONFIGS[family] | IDS | kwargs))
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0 if "embed" not in name and "wte" not in name else 12.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def forest(seed: int = 0) -> list[Example]:
    """Chains, pairs, a pair with one-token completions, a group of three and a tree of depth three."""
    rng = random.Random(seed)

    def ids(n):
        return [rng.randrange(3, VOCAB) for _ in range(n)]

    def leaf(n):
        return Node(ids(n), True)

    deep = Node(ids(6), False, (Node(ids(4), True, (leaf(5), leaf(3))), leaf(7)))
    trees = [
        (Node(ids(14), [False] * 5 + [True] * 6 + [False] + [True] * 2),),
        (Node(ids(9), False, (leaf(8), leaf(6))),),
        (Node(ids(5), False, (leaf(1), leaf(1))),),
        (Node(ids(3), False, (leaf(12), leaf(4), leaf(9))),),
        (deep,),
        (Node([*ids(4), *ids(5)], [False] * 4 + [True] * 5), Node(ids(8), [False] * 2 + [True] * 6)),
    ]
    return [Example(tree, row) for row, tree in enumerate(trees)]
