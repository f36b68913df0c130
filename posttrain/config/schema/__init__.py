"""Every setting with its type, default and description."""
