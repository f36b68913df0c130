"""Engines draw completions: token ids in, tokens with their log-probabilities out (docs/engines.md)."""

from posttrain.engines.embedded import EmbeddedEngine
from posttrain.engines.protocol import Completion, Engine, Sampling

__all__ = ["Completion", "EmbeddedEngine", "Engine", "Sampling"]
