"""New run: a form of the settings, which ends in a file, a command, and a run."""

from posttrain.ui.place import Place
from posttrain.ui.view import view
from posttrain.viewing.new_page import new_page, plan, start


def page(place: Place) -> None:
    view(place, new_page, seconds=2, acts={"plan": plan, "start": start})
