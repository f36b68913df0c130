"""Rewards of completions, with the reason of every number.

`tagged` and `maths` are rules graded in worker processes (posttrain.grading), `rules` lists them; `learned` is a
trained reward model, `python` a function of the user's, called by `calls`; `compose` has the rewards of the tokens
alone, adds all of them up and keeps every part.
"""
