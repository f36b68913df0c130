"""Rewards: what a completion is worth, as numbers that can be asked why they are so.

`tagged` and `maths` are rules graded in worker processes (posttrain.grading), `known` names them; `shaping` looks at
tokens alone; `learned` is a trained reward model, `python` a function of the user's own; `compose` adds them up and
keeps every part.
"""
