"""Optimizers with float32 masters, and the update over the packs of a batch."""
