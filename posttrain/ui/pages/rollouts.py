"""Rollouts: what a run was trained on, from a step's metrics down to the tokens."""

from posttrain.ui.place import Place
from posttrain.ui.view import view
from posttrain.viewing.rollouts_page import rollouts_page


def page(place: Place) -> None:
    view(place, rollouts_page, seconds=5)
