"""Checks and timings for half an hour on a GPU: `python -m benchmarks.gpu PART...`, or `make gpu` (docs/gpu.md)."""
