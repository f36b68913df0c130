"""Grading what a model wrote, in worker processes that may hang, crash or fill up without harm to the run.

`pool` supervises the workers, `worker` is one of them, `isolation` what a worker is kept from; `extract`, `numbers`,
`notation`, `answers` and `symbolic` say whether an answer equals the right one. Only a worker imports `symbolic`.
"""
