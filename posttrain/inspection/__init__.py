"""Inspection of a model or a run: sample, generate, score, and the receipt of a step."""
