"""Grades completions in worker processes that may hang, crash or run out of memory without harming the run.

`pool` supervises the workers, `process` is the supervisor's side of a worker, and `worker` is the worker itself, with
its template and its restrictions. `extract` finds the answer. `equality` decides whether it equals the reference: it
compares text that `notation` has normalised, using `numbers`, `units`, `sets` and `forms`, and as a last resort
`symbolic`, which only workers import.
"""
