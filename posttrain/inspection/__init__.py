"""What a model or a run does, looked at: sample, generate, score, and the receipt of a step."""
