"""Management of runs (docs/runs.md): what `posttrain runs` does. Does not import torch."""
