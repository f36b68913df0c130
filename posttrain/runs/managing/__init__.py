"""Keeping runs in order (docs/runs.md): what `posttrain runs` does. Imports no torch."""
