"""What a first half hour on a card should say: `python -m benchmarks.gpu PART...`, or `make gpu` (docs/gpu.md)."""
