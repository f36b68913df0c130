"""Data: rows as they are trained, and what was dropped."""

from posttrain.ui.place import Place
from posttrain.ui.view import view
from posttrain.viewing.data_page import check, data_page, read


def page(place: Place) -> None:
    view(place, data_page, seconds=2, acts={"read": read, "check": check})
