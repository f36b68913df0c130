"""Output for users: progress, curves, the report page, comparisons, listings."""
