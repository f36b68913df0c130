"""The loss lab (`posttrain losses`): one stored batch under every compatible loss and setting."""
