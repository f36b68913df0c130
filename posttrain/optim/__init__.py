"""Optimizers on float32 masters, schedules, and one update over the packs of a batch."""
