"""What every recipe's run shares: the loop, its state and checkpoints, checks, evaluation, resuming."""
