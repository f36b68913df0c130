"""The controls above a table or a picture: a form whose values become the page's address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.reports.markup import Child, Markup, el
from posttrain.viewing.address import Query


def form(path: str, *fields: Child) -> Markup:
    return el("form", *fields, action=path, method="get", data_go=True, class_="controls")


def hidden(query: Query, *names: str) -> list[Markup]:
    """Values of the address that other controls own, kept as they are."""
    return [el("input", type="hidden", name=name, value=value) for name in names for value in query.many(name)]


def search(name: str, label: str, value: str, hint: str = "", wide: bool = False) -> Markup:
    entry = el("input", type="search", name=name, value=value, placeholder=hint, autocomplete="off", maxlength=400)
    return _labelled(label, entry, "wide-field" if wide else "")


def entry(name: str, label: str, value: str, hint: str = "") -> Markup:
    """A short field for a number."""
    made = el("input", type="text", inputmode="decimal", name=name, value=value, placeholder=hint, size=6, maxlength=40)
    return _labelled(label, made)


def choice(
    name: str, label: str, choices: Sequence[str], value: str, empty: str = "", labels: Mapping[str, str] | None = None
) -> Markup:
    shown = labels or {}
    options = [el("option", shown.get(one, one or empty), value=one, selected=one == value) for one in choices]
    return _labelled(label, el("select", *options, name=name))


def slider(name: str, label: str, choices: Sequence[str], value: str) -> Markup:
    """A few steps as radio buttons: reachable by keyboard, readable at a glance."""
    options = [
        el("label", el("input", type="radio", name=name, value=one, checked=one == value), el("span", one))
        for one in choices
    ]
    return el("fieldset", el("legend", label), el("span", *options, class_="steps"))


def _labelled(label: str, control: Markup, class_: str = "") -> Markup:
    return el("label", el("span", label, class_="label"), control, class_=f"field {class_}".strip())
