"""Grading what a model wrote, in worker processes that may hang, crash or fill up without harm to the run.

`pool` supervises the workers, `template` forks them, `process` is a worker as seen from here, `worker` from within,
`isolation` what it is kept from. `extract` finds the answer; `answers` says whether it equals the right one, reading
`numbers`, `units`, `sets`, `parts`, `dates` and `labels` in the tidy text of `notation`, and asks `symbolic` last. Only
a worker imports `symbolic`.
"""
