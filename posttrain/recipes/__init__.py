"""The recipes of the methods. A recipe is a file that reads from top to bottom and owns its training loop.

The other half of a method, its settings and properties, is in posttrain/config/schema/. Every recipe has `train`.
Recipes that learn from given completions have `objectives`. Recipes that sample have `step_of`, `updates` and
`reference_of`; with rewards, also `surrogate`, the loss of each token, and `regraded`, advantages under new rewards.
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
