"""What settings are: every setting with its type, default and description."""
