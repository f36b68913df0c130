"""The loss of a value head, from predicted values and observed returns, and the scale of both."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DECAY = 0.9  # factor of a step's weight in the running statistics, per later step


@dataclass(frozen=True, slots=True)
class ReturnScale:
    """Running mean and standard deviation of the returns: V = mean + std · (output of the value head).

    Keeps the value loss on one scale whatever the scale of the rewards (value normalisation as in MAPPO, arXiv
    2103.01955, section 5.1). Recent steps have the most weight, so that the values follow a rising reward.
    """

    mean: float = 0.0
    std: float = 1.0
    steps: int = 0

    def after(self, return_N: Tensor) -> "ReturnScale":
        """The statistics including a step's returns. If the variance is 0, std is 1."""
        returns, steps = return_N.detach().double(), self.steps + 1
        share = (1 - DECAY) / (1 - DECAY**steps)  # 1 at the first step: the initial values do not count
        distance = float(returns.mean()) - self.mean
        variance = self.std**2 + share * distance**2 if self.steps else 0.0
        variance = (1 - share) * variance + share * float(returns.var(correction=0))
        return ReturnScale(self.mean + share * distance, math.sqrt(variance) if variance > 0 else 1.0, steps)

    def values(self, output: Tensor) -> Tensor:
        """Outputs of the value head as returns."""
        return self.mean + self.std * output

    def outputs(self, returns: Tensor) -> Tensor:
        """Returns as outputs of the value head."""
        return (returns - self.mean) / self.std


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, cliprange_value: float) -> tuple[Tensor, Tensor]:
    """½ max((V − R)², (V_clip − R)²), V_clip = V clipped to V_old ± `cliprange_value`; and where V_clip was worse.

    PPO's value loss as in the code of arXiv 1707.06347 and TRL's PPO; elementwise, tensors of one shape.
    """
    if not value.shape == old_value.shape == returns.shape:
        shapes = ", ".join(str(list(t.shape)) for t in (value, old_value, returns))
        raise ValueError(f"expected values, old values and returns of one shape, got {shapes}")
    held = torch.clamp(value, old_value - cliprange_value, old_value + cliprange_value)
    free, clipped = (value - returns) ** 2, (held - returns) ** 2
    return 0.5 * torch.maximum(free, clipped), (clipped > free).detach()
