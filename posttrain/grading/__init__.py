"""Grading of completions in worker processes that may hang, crash or run out of memory without harm to the run.

`pool` supervises the workers, `template` forks them, `process` is the supervisor's side of a worker, `worker` the
worker itself, `isolation` its restrictions. `extract` finds the answer; `equality` decides whether it equals the right
one by `numbers`, `units`, `sets`, `parts`, `dates` and `labels` in the normalised text of `notation`, and last by
`symbolic`, which only workers import.
"""
