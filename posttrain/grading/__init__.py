"""Grading of completions in worker processes that may hang, crash or run out of memory without harm to the run.

`pool` supervises the workers, `process` is the supervisor's side of a worker, `worker` the worker itself with its
template and its restrictions. `extract` finds the answer; `equality` decides whether it equals the right one by
`numbers`, `units`, `sets` and `forms` in the normalised text of `notation`, and last by `symbolic`, which only workers
import.
"""
