"""The methods, one recipe each: a file that reads top to bottom and owns its training loop.

The other half of a method, its settings and facts, is in posttrain/config/schema/. Every recipe has `train`. One that
learns from given completions has `objectives`; one that samples them `step_of`, `updates` and `reference_of`, and with
rewards `surrogate`, the loss of each token, and `regraded`, the advantages of stored completions under other rewards.
"""

from types import ModuleType

from posttrain.recipes import distill, grpo, kto, ppo, preference, reference_free, reward, sft

OFFLINE: dict[str, ModuleType] = {
    "sft": sft,
    "reward": reward,
    "dpo": preference,
    "orpo": reference_free,
    "cpo": reference_free,
    "simpo": reference_free,
    "kto": kto,
}
REWARDED: dict[str, ModuleType] = {"ppo": ppo, "grpo": grpo, "rloo": grpo, "reinforce_plus_plus": grpo}
ONLINE = {**REWARDED, "distill": distill}
RECIPES = {**OFFLINE, **ONLINE}
