"""Gradient checkpointing: a layer saves only its input, and is recomputed in backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.families import base_of


def enable_gradient_checkpointing(policy: nn.Module) -> None:
    """Recompute each layer's activations in backward, in training and evaluation mode.

    transformers' own switch works in training mode only, which would also turn on the dropout that some layers apply
    themselves (OPT, Falcon); the recipe decides on dropout.
    """
    for layer in base_of(policy).modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    """The layer's forward, recomputed in backward if there is one. Without gradients `checkpoint` would still save the
    state of random generators at every call, of which engines make thousands."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **settings)
    return checkpoint(forward, *inputs, use_reentrant=False, **settings)
