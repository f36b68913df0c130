"""Rewards of completions, with the reason of every number.

`tagged` and `maths` are rules graded in worker processes (posttrain.grading), `rules` lists them; `shaping` looks only
at tokens; `learned` is a trained reward model, `python` a function of the user's; `compose` adds them up and keeps
every part.
"""
