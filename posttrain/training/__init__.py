"""Shared by the runs of all recipes: the loop, its state and checkpoints, checks, evaluation, resuming."""
