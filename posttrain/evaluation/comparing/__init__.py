"""Comparison of models item by item (docs/compare.md).

`sources` reads what can be compared, `sides` groups runs that differ by their seed, `items` finds the items that two
sides share, `differences` tests them, `page` and `picture` show the result.
"""
