"""The interactive mode of `posttrain runs`: a table of runs with keys to manage them."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Input, Label, OptionList, Static

from posttrain.base.errors import PosttrainError, RunError
from posttrain.base.files import table_beside
from posttrain.base.terminal import visible
from posttrain.base.words import counted, in_units
from posttrain.runs.finding import root_of, short
from posttrain.runs.folder import Notes, read_notes, write_notes
from posttrain.runs.managing.copies import read_snapshot, restore, snapshots_of, take
from posttrain.runs.managing.facts import difference_table, facts_of
from posttrain.runs.managing.listing import ORDERS, filtered, ordered
from posttrain.runs.managing.paths import described as needed_by
from posttrain.runs.managing.paths import refuse_needed, rename
from posttrain.runs.managing.removing import Plan, delete, described, plan_prune, prune, spare_needed
from posttrain.runs.summary import DAMAGED, RunSummary, summaries_below

TITLES = ("name", "state", "step", "result", "method", "model", "size", "started")  # the last ones may need scrolling
STYLES = {"running": "bold cyan", "finished": "green", "failed": "bold red", "killed": "red", DAMAGED: "bold red"}
HELP = Path(__file__).with_name("screen.txt").read_text(encoding="utf-8").rstrip()
Result = TypeVar("Result")


class TextScreen(ModalScreen[bool]):
    """A page of text or a table, closed by Escape, Enter, q or ?."""

    BINDINGS: ClassVar = [Binding("escape,enter,q,question_mark", "dismiss", "close")]
    LOOK = "page"  # class in screen.tcss

    def __init__(self, text: str | Table):
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes=self.LOOK):
            yield Static(Text(self._text) if isinstance(self._text, str) else self._text)
        yield Footer(compact=True)


class DialogScreen(ModalScreen[Result | None]):
    """A question with a widget for the answer; Escape returns None."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss", "cancel")]

    def __init__(self, question: str, widget: Widget):
        super().__init__()
        self._question, self._widget = question, widget

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(Text(self._question))
            yield self._widget
        yield Footer(compact=True)


class InputScreen(DialogScreen[str]):
    """A field for one line of text."""

    def __init__(self, question: str, value: str):
        super().__init__(question, Input(value, select_on_focus=False))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class ConfirmScreen(TextScreen, inherit_bindings=False):
    """A question: y means yes; n, Escape, Enter and q mean no."""

    BINDINGS: ClassVar = [Binding("y", "dismiss(True)", "yes"), Binding("n,escape,enter,q", "dismiss(False)", "no")]
    LOOK = "dialog"

    def __init__(self, question: str):
        super().__init__(f"{question}\n\ny: yes     n: no")


class ChoiceScreen(DialogScreen[int]):
    """A list to choose from with the arrow keys and Enter: returns the index, or None also for q."""

    BINDINGS: ClassVar = [Binding("q", "dismiss", "cancel", show=False)]

    def __init__(self, question: str, choices: Sequence[str]):
        super().__init__(question, OptionList(*(Text(visible(choice)) for choice in choices)))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_index)


class RunsApp(App[None]):
    """The runs below a folder. Errors are shown as messages at the bottom; the app modifies a run only when a key is
    pressed."""

    TITLE = "posttrain runs"
    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = "screen.tcss"
    BINDINGS: ClassVar = [Binding(**key) for key in table_beside(__file__, "keys.yaml")]

    def __init__(self, root: Path):
        super().__init__()
        self.root = root
        self.runs: list[RunSummary] = []  # all runs
        self.shown: list[RunSummary] = []  # the runs in the table, in its order
        self.terms = ""
        self.compared: Path | None = None  # the first of two runs to compare
        self.order, self.reverse = "time", True  # the latest first, where the cursor starts

    def compose(self) -> ComposeResult:
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Input(placeholder="words, or state=failed, step>100, size>1GB, tag=keep, age>30d", id="filter")
        yield Static(id="status")
        yield Footer(compact=True)

    @property
    def table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    @property
    def current(self) -> RunSummary | None:
        """The run under the cursor."""
        index = self.table.cursor_row
        return self.shown[index] if 0 <= index < len(self.shown) else None

    def on_mount(self) -> None:
        self.table.add_columns(*TITLES)
        self.action_read()
        self.table.focus()

    # The table

    def action_read(self) -> None:
        """Read the folder again; the cursor remains on the same run."""
        self.runs = summaries_below(self.root)
        self.fill()

    def fill(self) -> None:
        """Show the runs that match the filter, in the chosen order."""
        chosen, problem = self.current, ""
        try:
            self.shown = ordered(filtered(self.runs, self.terms.split()), self.order, self.reverse)
        except RunError as error:  # the filter is not complete yet: the table is unchanged
            problem = str(error)
        self.table.clear()
        for run in self.shown:
            self.table.add_row(*_cells(run))
        chosen_row = next((row for row, run in enumerate(self.shown) if chosen and run.folder == chosen.folder), 0)
        self.table.move_cursor(row=chosen_row)
        of = f" of {len(self.runs):,}" if len(self.shown) < len(self.runs) else ""
        what = f"{counted(len(self.shown), 'run')}{of} in {self.root}, {in_units(sum(run.size for run in self.shown))}"
        order = f"sorted by {self.order}{', reversed' if self.reverse else ''}"
        parts = [what, order, *([f"filter: {self.terms}"] if self.terms else []), *([problem] if problem else [])]
        self.query_one("#status", Static).update(Text(visible(" · ".join(parts))))

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self.terms = event.value
            self.fill()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self.table.focus()

    def on_data_table_row_selected(self) -> None:
        self.action_show()

    # Keys

    def action_show(self) -> None:
        """Show what `posttrain runs show` prints, with the names in a column."""
        if run := self.current:
            with self._errors_shown():
                facts = facts_of(RunSummary(run.folder))
                width = max(len(name) for name, _ in facts)
                self.push_screen(TextScreen(visible("\n".join(f"{name:<{width}}  {value}" for name, value in facts))))

    def action_help(self) -> None:
        self.push_screen(TextScreen(HELP))

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def action_clear(self) -> None:
        """Clear the filter and close its field."""
        field = self.query_one("#filter", Input)
        field.value = ""
        field.remove_class("open")
        self.table.focus()

    def action_order(self) -> None:
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self.reverse = self.order in ("time", "result", "size", "step")
        self.fill()

    def action_reverse(self) -> None:
        self.reverse = not self.reverse
        self.fill()

    @work
    async def action_tags(self) -> None:
        if run := self.current:
            field = InputScreen(f"tags of {visible(run.name)}, separated by spaces", " ".join(run.tags))
            if (words := await self.push_screen_wait(field)) is not None:
                tags = tuple(word.lstrip("#") for word in words.split())
                with self._changing():
                    write_notes(run.folder, Notes(tags, read_notes(run.folder).note))

    @work
    async def action_note(self) -> None:
        if run := self.current:
            text = await self.push_screen_wait(InputScreen(f"note of {visible(run.name)}", " ".join(run.note.split())))
            if text is not None:
                with self._changing():
                    write_notes(run.folder, Notes(read_notes(run.folder).tags, text.strip()))

    @work
    async def action_rename(self) -> None:
        if run := self.current:
            whole = root_of(run.folder)  # a stage has the name that the settings give it
            name = await self.push_screen_wait(InputScreen(f"new name of {visible(short(whole))}", whole.name))
            if name is not None and name != whole.name:
                with self._changing():
                    done = rename(whole, name, [self.root])
                    also = f"; updated {counted(len(done.updated), 'file')}" if done.updated else ""
                    left = f"; still has the old path: {', '.join(done.left)}" if done.left else ""
                    look = "warning" if left else "information"
                    self._say(f"{short(whole)} is now {done.folder.name}{also}{left}", look)

    async def _of_stage(self, run: Path) -> Path | None:
        """The folder that is meant: for a stage or model of a whole run, one of both; None if the user cancels."""
        folders = list(dict.fromkeys([run.resolve(), root_of(run)]))
        if len(folders) == 1:
            return run
        with self._errors_shown():  # such as a run that was deleted meanwhile
            lines = await asyncio.to_thread(lambda: [described(folder) for folder in folders])
            choice = await self.push_screen_wait(ChoiceScreen("This stage, or the whole run?", lines))
            return None if choice is None else folders[choice]
        return None

    @work
    async def action_delete(self) -> None:
        if (run := self.current) and (target := await self._of_stage(run.folder)):
            with self._errors_shown():
                refuse_needed([target], [self.root], short(target))
                if await self.push_screen_wait(ConfirmScreen(f"Permanently delete {visible(described(target))}?")):
                    with self._changing():
                        delete(target, [self.root])
                        self._say(f"deleted {short(target)}")

    def action_compare(self) -> None:
        """Remember the run; with a second run, show what `posttrain runs diff` prints."""
        if (run := self.current) is None:
            return
        if self.compared in (None, run.folder):
            self.compared = run.folder
            self._say(f"compare {run.name} with another run: go to it and press c")
        else:
            first, self.compared = self.compared, None
            with self._errors_shown():
                self.push_screen(TextScreen(difference_table(first, run.folder)))

    @work
    async def action_prune(self) -> None:
        if run := self.current:
            with self._errors_shown():
                plan = await asyncio.to_thread(self._prunable, run.folder)
                if not plan.items:
                    self._say(f"{run.name} has nothing to prune")
                    return
                lines = [f"{in_units(item.size):>7}  {item.path.name}  ({item.why})" for item in plan.items]
                question = "\n".join([f"Delete from {run.name}, {in_units(plan.size)}?", *lines])
                if await self.push_screen_wait(ConfirmScreen(visible(question))):
                    with self._changing():
                        self._say(f"freed {in_units(prune(plan))}")

    def _prunable(self, run: Path) -> Plan:
        plan = plan_prune(run)
        spare_needed([plan], [self.root])
        if plan.needs:
            raise RunError(f"{run} is not pruned: {needed_by(plan.needs)}")
        return plan

    @work
    async def action_snapshot(self) -> None:
        if (run := self.current) and (target := await self._of_stage(run.folder)):
            self._say(f"copying {short(target)} …")
            with self._errors_shown():
                folder = await asyncio.to_thread(take, target)
                self._say(f"snapshot: {folder.name}")

    @work
    async def action_restore(self) -> None:
        """Restore a snapshot; a run that is there is replaced after confirmation."""
        with self._errors_shown():
            stored = [read_snapshot(folder) for folder in reversed(snapshots_of(self.root))]  # the latest first
            if not stored:
                self._say("there are no snapshots: s takes one")
                return
            lines = [f"{copy.folder.name}  {in_units(copy.size)}  {copy.problem or copy.note}" for copy in stored]
            chosen = await self.push_screen_wait(ChoiceScreen("Restore which snapshot?", lines))
            if chosen is None:
                return
            snapshot = stored[chosen]
            exists = snapshot.run.exists()
            question = f"Replace {visible(described(snapshot.run))} by the snapshot?" if exists else ""
            if not question or await self.push_screen_wait(ConfirmScreen(question)):
                with self._changing():
                    folder = await asyncio.to_thread(restore, snapshot.folder, None, exists)
                    self._say(f"verified and restored: {short(folder)}")

    @contextmanager
    def _errors_shown(self) -> Iterator[None]:
        """In this block, an error becomes a message."""
        try:
            yield
        except (PosttrainError, OSError) as error:
            self._say(str(error), "error")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """In this block, an error becomes a message; then the folder is read again."""
        with self._errors_shown():
            yield
        self.action_read()

    def _say(self, text: str, severity: str = "information") -> None:
        self.notify(visible(text), severity=severity, timeout=8, markup=False)  # pyright: ignore[reportArgumentType]


def _cells(run: RunSummary) -> list[Text]:
    """A run's cells; markup in names and settings is not interpreted."""
    started = f"{run.started_at:%m-%d %H:%M}" if run.started_at else ""
    name = Text(_line(run.name), "bold")
    name.append("".join(f" #{_line(tag)}" for tag in run.tags), "not bold magenta")
    state = Text(run.state, STYLES.get(run.state, "yellow"))
    method, model, result = (Text(_line(text)) for text in (run.method, run.model, run.headline))
    step, size = (Text(text, justify="right") for text in (f"{run.step:,}", in_units(run.size)))
    return [name, state, step, result, method, model, size, Text(started)]


def _line(text: str) -> str:
    return " ".join(visible(text).split())
