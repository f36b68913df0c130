"""Before a run: its steps and examples, an estimate of its memory, the largest step, a probe."""
