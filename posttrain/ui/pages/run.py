"""Run: one run's curves, checks, data, log and command."""

from posttrain.ui.place import Place
from posttrain.ui.view import view
from posttrain.viewing.run_page import run_page


def page(place: Place) -> None:
    view(place, run_page, seconds=3)
