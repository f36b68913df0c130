"""Suites, verdicts and records of an evaluation (docs/eval.md). Imports no torch."""
