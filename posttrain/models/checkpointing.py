"""Gradient checkpointing: a layer keeps its input alone for backward, and is computed again there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.families import base_of


def enable_gradient_checkpointing(policy: nn.Module) -> None:
    """Recompute each layer's activations in backward, be the layer in training mode or not.

    transformers' own switch works in training mode only, which would also turn on the dropout that some layers apply
    themselves (OPT, Falcon); whether there is dropout is for the recipe to say.
    """
    for layer in base_of(policy).modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    """The layer's forward, recomputed in backward where there will be one. Without gradients `checkpoint` would still
    save the state of random generators at every call, which engines make by the thousand."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **settings)
    return checkpoint(forward, *inputs, use_reentrant=False, **settings)
