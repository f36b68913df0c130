"""Evaluations: means with intervals, the four classes, answers side by side."""

from posttrain.ui.place import Place
from posttrain.ui.view import view
from posttrain.viewing.evaluations_page import evaluations_page


def page(place: Place) -> None:
    view(place, evaluations_page, seconds=10)
