"""The loss of a value head: what was predicted before each token against the return that came."""

import torch
from torch import Tensor


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, cliprange_value: float) -> tuple[Tensor, Tensor]:
    """½ max((V − R)², (V_clip − R)²), V_clip = V held within `cliprange_value` of V_old; and where V_clip was worse.

    PPO's value loss as in the code of arXiv 1707.06347 and TRL's PPO; elementwise, tensors of one shape.
    """
    if not value.shape == old_value.shape == returns.shape:
        shapes = ", ".join(str(list(t.shape)) for t in (value, old_value, returns))
        raise ValueError(f"expected values, old values and returns of one shape, got {shapes}")
    held = torch.clamp(value, old_value - cliprange_value, old_value + cliprange_value)
    free, clipped = (value - returns) ** 2, (held - returns) ** 2
    return 0.5 * torch.maximum(free, clipped), (clipped > free).detach()
