"""`posttrain sweep`: one run for each combination of settings, compared by an evaluation metric (docs/sweep.md).

`space` makes trials of `a.b=1,2,3`, `stopping` has the median rule, `records` is sweep.json, `trials` runs them, `show`
has the table and the picture.
"""
