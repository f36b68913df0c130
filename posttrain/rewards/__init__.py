"""Rewards of completions, with the reason for every value.

`tagged` and `maths` are rules, graded in worker processes (posttrain.grading) and listed in `rules`; `learned` is a
trained reward model; `python` is a user's function, called through `calls`; `compose` defines the rewards that depend
only on tokens, adds up all rewards and keeps every part.
"""
