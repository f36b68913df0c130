"""Runs: all of them in a live table, some of them compared."""

from posttrain.ui.place import Place
from posttrain.ui.view import view
from posttrain.viewing.runs_page import runs_page


def page(place: Place) -> None:
    view(place, runs_page, seconds=3)
