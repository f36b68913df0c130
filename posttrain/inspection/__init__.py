"""Inspection of models, data and runs: sample, generate, score, regrade, data checks, and the loss lab."""
