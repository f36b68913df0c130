"""Linear attention over a pack: a layer's recurrent state is forked where a tree branches.

The layers of hybrid models (gated delta rule, arXiv 2412.06464, after a short convolution) have a recurrent state
instead of keys and values. Every node of a tree is one call of transformers' own forward, which starts with its
parent's final states; gradients flow back through them. Siblings start with the same states and never see each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MethodType

import torch
from torch import Tensor, nn

from posttrain.models.attention import PackedMask, Visible

LAYERS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})


def fork_states(module: nn.Module) -> bool:
    """Set a forward that takes packs on a linear-attention layer, in place; False for any other module."""
    if type(module).__name__ not in LAYERS:
        return False
    module.forward = MethodType(_forward, module)
    return True


def _forward(self, hidden_states: Tensor, *args, packed: Visible | None = None, **settings) -> Tensor:
    if packed is None:
        return type(self).forward(self, hidden_states, *args, **settings)
    assert isinstance(packed, PackedMask), "only transformers' engine has recurrent states"
    ends: dict[int, _States] = {}
    parts = []
    for node in packed.nodes():
        parent = ends[node.before[-1].start] if node.before else None
        states = ends[node.start] = _States(parent)
        parts.append(type(self).forward(self, hidden_states[:, node.start : node.stop], cache_params=states))
    return torch.cat(parts, dim=1)


class _States:
    """The cache interface of a transformers layer: provides the initial states of a node, and receives its final ones.

    `conv` are the last inputs of the convolution (1, channels, width - 1), `recurrent` the state of the delta rule.
    """

    def __init__(self, parent: _States | None):
        self.conv = None if parent is None else parent.conv
        self.recurrent = None if parent is None else parent.recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # states are never changed in place: siblings start with them, too

    # transformers 5.17 reads them from cache.layers[layer_idx] instead.

    record_past = True

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return self.recurrent is not None

    @property
    def layers(self) -> Mapping[int, _States]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> list[Tensor | None]:
        return [self.conv]

    @property
    def recurrent_states(self) -> list[Tensor | None]:
        return [self.recurrent]

    def update_conv_state(self, inputs: Tensor, layer_idx: int, conv_kernel_size: int, **_unused) -> Tensor:
        """The inputs (1, channels, T) with the preceding ones in front, which the convolution sees, too."""
        if self.conv is None:  # the convolution pads with zeros itself
            seen = inputs
            whole = nn.functional.pad(inputs, (conv_kernel_size - 1, 0))
        else:
            seen = whole = torch.cat([self.conv, inputs], dim=-1)
        self.conv = whole[..., whole.shape[-1] - conv_kernel_size + 1 :]
        return seen

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_unused) -> Tensor:
        self.recurrent = state
        return state
