"""Optimizers on float32 masters, schedules, and the update over the packs of a batch."""
