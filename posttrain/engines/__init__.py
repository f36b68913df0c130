"""Engines generate completions: token ids in, tokens with their log-probabilities out (docs/engines.md)."""

from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.config.schema.rollout import EngineName, VllmConfig
from posttrain.engines.embedded import EmbeddedEngine
from posttrain.engines.plain import TransformersEngine
from posttrain.engines.protocol import Completion, Engine, Finished, Sampling, seed_of, stop_token_ids, text_of
from posttrain.parallel.ranks import ALONE, Ranks

__all__ = [
    "Completion", "EmbeddedEngine", "Engine", "Finished", "Sampling", "TransformersEngine", "make_engine",
    "seed_of", "stop_token_ids", "text_of",
]  # fmt: skip


def make_engine(
    name: EngineName,
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    version: int = 0,
    vllm: VllmConfig | None = None,
    longest_prompt: int = 1,
    ranks: Ranks = ALONE,
) -> Engine:
    """Return the engine called `name` for `policy`. Close it after use, because it may hold a process or GPU memory.
    Raises ModelError if the engine cannot run this model.

    `vllm`: settings of vLLM. `longest_prompt`: number of tokens for which the embedded engine sizes its GPU memory.
    `ranks`: the ranks that use the engine together and share vLLM's servers.
    """
    if name == "vllm":
        from posttrain.engines.vllm.engine import VllmEngine

        return VllmEngine(policy, tokenizer, version=version, settings=vllm, ranks=ranks)
    if name == "transformers":
        return TransformersEngine(policy, tokenizer, version=version)
    return EmbeddedEngine(policy, tokenizer, version=version, longest_prompt=longest_prompt)
