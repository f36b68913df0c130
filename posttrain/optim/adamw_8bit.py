"""AdamW whose moments take one byte each: bitsandbytes' block-wise dynamic quantisation.

Every 256 values of a moment are stored as bytes with their own scale (Dettmers et al., arXiv 2110.02861). At each step
a block is converted to float32, updated as in AdamW, and rounded again. As the paper advises, embeddings keep float32
moments, and so do small tensors, which would save nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posttrain.base.extras import need
from posttrain.optim.adamw import AdamW

BLOCK = 256  # values that share a scale
SMALLEST = 4096  # elements of the smallest tensor with 8-bit moments, bitsandbytes' own limit


def eight_bit_names(model: nn.Module) -> set[str]:
    """Trained parameters with 8-bit moments: large tensors except embeddings."""
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return {
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.numel() >= SMALLEST and p not in embeddings
    }


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments. The masters, where the model computes in bfloat16, stay float32."""

    def __init__(self, model: nn.Module, *args, **settings):
        self._library = need("bitsandbytes.functional", "quant", "training.optimizer: adamw_8bit")
        self._names = eight_bit_names(model)
        self._moments: dict[str, dict[str, Tensor]] = {}
        self._codes: dict[torch.device, tuple[Tensor, Tensor]] = {}
        super().__init__(model, *args, **settings)

    def _torch_adamw(self, masters: Mapping[str, Tensor]) -> torch.optim.AdamW:
        return super()._torch_adamw({name: m for name, m in masters.items() if name not in self._names})

    def _update(self, learning_rate: float) -> None:
        super()._update(learning_rate)
        for name in sorted(self._names):
            master = self.masters[name]
            if master.grad is None:
                continue
            moments = self._moments_of(name)
            moments["step"] += 1
            signed, unsigned = self._codes_on(master.device)
            self._library.optimizer_update_8bit_blockwise(
                "adam",  # with decoupled weight decay: AdamW
                master.grad.contiguous(),
                master,
                moments["exp_avg"],
                moments["exp_avg_sq"],
                *self.betas,
                0.0,  # beta3 and alpha are AdEMAMix's
                0.0,
                self.eps,
                int(moments["step"]),
                learning_rate,
                signed,
                unsigned,
                moments["exp_avg_scale"],
                moments["exp_avg_sq_scale"],
                self.weight_decay if master.ndim >= 2 else 0.0,
            )

    def _moments_of(self, name: str) -> dict[str, Tensor]:
        if name not in self._moments:
            master = self.masters[name]
            assert master.is_contiguous()  # a block is 256 adjacent values in memory
            blocks = -(-master.numel() // BLOCK)
            self._moments[name] = {"step": torch.zeros(())}
            for moment in ("exp_avg", "exp_avg_sq"):
                self._moments[name][moment] = torch.zeros_like(master, dtype=torch.uint8)
                self._moments[name][f"{moment}_scale"] = torch.zeros(blocks, device=master.device)
        return self._moments[name]

    def _codes_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The value of each byte, between -1 and 1 for the first moment, between 0 and 1 for the second."""
        if device not in self._codes:
            signed, unsigned = (self._library.create_dynamic_map(signed=signed) for signed in (True, False))
            self._codes[device] = signed.to(device), unsigned.to(device)
        return self._codes[device]

    def state(self) -> dict[str, Tensor]:
        tensors = super().state()
        for name, moments in self._moments.items():
            tensors |= {f"{name}|{key}": value for key, value in moments.items()}
        return tensors

    def _shapes(self, name: str) -> dict[str, torch.Size]:
        if name not in self._names:
            return super()._shapes(name)
        return {key: value.shape for key, value in self._moments_of(name).items()}

    def _forget_moments(self, name: str) -> None:
        super()._forget_moments(name)
        self._moments.pop(name, None)

    def _load(self, name: str, key: str, value: Tensor) -> None:
        if name in self._names:
            self._moments_of(name)[key].copy_(value)
        else:
            super()._load(name, key, value)
