"""Comparison of models item by item (docs/compare.md).

`sources` reads what can be compared and groups runs that differ only in their seed into sides; `differences` finds the
items that two sides share and tests their scores; `judged` adds a judge's preferences; `page` shows the result.
"""
