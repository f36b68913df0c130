"""The console for tables, progress bars and strings."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from posttrain.base.terminal import visible


class PlainConsole(Console):
    """rich's console for strings of any origin: no markup, no emoji, and control characters shown as escapes.

    Styles are passed separately (`style=`, `Text.append`).
    """

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **settings: Any) -> Text:
        """As in rich, after escaping, so that a table measures what it shows."""
        return super().render_str(visible(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As in rich; escapes `Text` objects, which do not pass through `render_str`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def numbers_table(*columns: str) -> Table:
    """A narrow table: a first column of names, which folds, and right-aligned columns of numbers, which do not."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def cells_of(table: Table) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a terminal's table."""
    header = [str(column.header) for column in table.columns]
    rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    return header, [list(row) for row in rows]
