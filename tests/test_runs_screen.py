"""The interactive mode of `posttrain runs`, driven by its keys."""

import asyncio
import json
from pathlib import Path

import pytest
from test_cli_runs import make
from test_managing import checkpoints, settings, with_checkpoints
from textual.widgets import DataTable, Input, Static

from posttrain.runs import folder as folders
from posttrain.runs.finding import find_runs
from posttrain.runs.folder import Notes, read_notes, write_notes
from posttrain.runs.managing.copies import snapshots_of
from posttrain.runs.managing.screen import ChoiceScreen, ConfirmScreen, InputScreen, RunsApp, TextScreen
from posttrain.runs.run import Run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "PATIENCE_S", 0.05)
    with_checkpoints(Path("runs/judge"), 5, 7)
    rewards = {"method": {"type": "grpo"}, "rewards": [{"type": "model", "path": "runs/judge/final"}]}
    make(Path("runs/policy"), 4, settings(**rewards))
    make(Path("runs/evil\x1b[31m[red]x[/red]"), 1)
    return Path("runs")


def drive(folder: Path, steps) -> RunsApp:
    """Run the screen, and `steps(app, pilot)` on it."""
    app = RunsApp(folder)
    app.animation_level = "none"

    async def session() -> None:
        async with app.run_test(size=(90, 16)) as pilot:
            await steps(app, pilot)

    asyncio.run(session())
    return app


def seen(app: RunsApp) -> list[str]:
    return [row.name for row in app.shown]


def message_of(app: RunsApp) -> str:
    return " | ".join(notice.message for notice in app._notifications)


async def typed(pilot, text: str, *keys: str) -> None:
    """Type over what the field has."""
    pilot.app.screen.query_one(Input).value = text
    await pilot.press(*keys, "enter")
    await pilot.pause()


async def settled(app: RunsApp, pilot, reached=lambda: False) -> None:
    """Wait until no key is at work any more, or `reached()`."""
    await pilot.pause()
    while list(app.workers) and not reached():
        await asyncio.sleep(0.01)
    await pilot.pause()


async def on(app: RunsApp, pilot, name: str) -> None:
    app.table.move_cursor(row=seen(app).index(name))
    await pilot.pause()


def test_order_filter_and_show(folder):
    async def steps(app, pilot):
        assert len(app.shown) == 3 and isinstance(app.focused, DataTable)
        names = " ".join(str(cell) for row in range(3) for cell in app.table.get_row_at(row))
        assert r"evil\x1b[31m[red]x[/red]" in names and "\x1b" not in names
        await pilot.press("o")
        assert app.order == "name" and seen(app)[-1] == "policy"
        await pilot.press("O")
        assert seen(app)[0] == "policy"
        await pilot.press("slash", *"method=grpo")
        assert seen(app) == ["policy"] and "1 run of 3" in str(app.query_one("#status", Static).render())
        app.query_one("#filter", Input).value += " step>"  # half typed
        await pilot.pause()
        assert "not a number" in str(app.query_one("#status", Static).render()) and seen(app) == ["policy"]
        await pilot.press("enter")
        assert isinstance(app.focused, DataTable)
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, TextScreen) and "grpo" in app.screen._text
        await pilot.press("escape")
        await pilot.press("escape")
        assert len(app.shown) == 3 and app.terms == ""
        await pilot.press("question_mark")
        assert isinstance(app.screen, TextScreen) and "snapshot" in app.screen._text
        await pilot.press("q")
        assert not isinstance(app.screen, TextScreen)
        await pilot.press("q")

    assert drive(folder, steps).return_code == 0


def test_tags_note_and_name(folder):
    async def steps(app, pilot):
        await on(app, pilot, "judge")
        await pilot.press("t")
        await pilot.pause()
        assert isinstance(app.screen, InputScreen)
        await typed(pilot, "keep #paper")
        await pilot.press("n")
        await pilot.pause()
        await typed(pilot, "the <b>one</b>")
        assert read_notes(folder / "judge") == Notes(("keep", "paper"), "the <b>one</b>")
        assert app.current.name == "judge" and app.current.tags == ("keep", "paper")
        await pilot.press("n")
        await pilot.pause()
        await pilot.press("x", "escape")  # cancelled
        assert read_notes(folder / "judge").note == "the <b>one</b>"
        await pilot.press("t")
        await pilot.pause()
        await typed(pilot, "no/good\x1b")
        assert "is not a tag" in message_of(app) and read_notes(folder / "judge").tags == ("keep", "paper")
        for name, message in (("../x", "cannot name a run"), ("critic", "updated 2 files")):
            await pilot.press("r")
            await pilot.pause()
            await typed(pilot, name)
            assert message in message_of(app), name
        assert seen(app).count("critic") == 1 and "runs/critic/final" in (folder / "policy/config.yaml").read_text()

    drive(folder, steps)


def test_delete_prune_and_snapshot(folder):
    async def steps(app, pilot):
        await on(app, pilot, "judge")
        await pilot.press("s")
        await settled(app, pilot)
        assert len(snapshots_of(folder)) == 1 and "snapshot: judge-" in message_of(app)
        await pilot.press("d")
        await pilot.pause()
        assert "needed by 1 other run" in message_of(app) and not isinstance(app.screen, ConfirmScreen)
        for answer, left in (("n", 3), ("y", 1)):
            await pilot.press("p")
            await settled(app, pilot, lambda: isinstance(app.screen, ConfirmScreen))
            assert isinstance(app.screen, ConfirmScreen) and "checkpoint-5" in app.screen._text
            await pilot.press(answer)
            await pilot.pause()
            assert len(checkpoints(folder / "judge")) == left
        await pilot.press("p")
        await settled(app, pilot)
        assert "nothing to prune" in message_of(app)
        await on(app, pilot, "policy")
        for answer, left in (("enter", 3), ("y", 2)):
            await pilot.press("d")
            await pilot.pause()
            await pilot.press(answer)
            await pilot.pause()
            assert len(find_runs(folder)) == left and len(app.shown) == left
        assert "deleted runs/policy" in message_of(app)

    drive(folder, steps)


def test_two_runs_are_compared(folder):
    async def steps(app, pilot):
        await on(app, pilot, "judge")
        await pilot.press("c")
        assert "compare judge with another run" in message_of(app)
        await on(app, pilot, seen(app)[[name.startswith("evil") for name in seen(app)].index(True)])
        await pilot.press("c")
        await pilot.pause()
        assert isinstance(app.screen, TextScreen)
        table = app.screen._text
        assert [str(column.header) for column in table.columns][:2] == ["", "judge"]
        assert "settings:" in str(next(iter(table.columns[0].cells))) and app.compared is None
        assert str(table.columns[2].header) == "red]", "markup is not interpreted"
        await pilot.press("escape")

    drive(folder, steps)


def test_a_snapshot_is_restored(folder):
    """It neither blocks the renaming of its run, though its adapter names the run's model as its base, nor its
    deletion; a run that is there is replaced after confirmation."""
    for name in ("best", "model"):
        (folder / "judge" / name).mkdir()
    (folder / "judge/best/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "runs/judge/model"}))

    async def steps(app, pilot):
        await pilot.press("S")
        await settled(app, pilot)
        assert "there are no snapshots" in message_of(app)
        await on(app, pilot, "judge")
        await pilot.press("s")
        await settled(app, pilot)
        await pilot.press("r")
        await pilot.pause()
        await typed(pilot, "critic")
        assert "runs/judge is now critic" in message_of(app) and not (folder / "judge").exists()
        for key, restored in (("escape", False), ("enter", True)):
            await pilot.press("S")
            await settled(app, pilot, lambda: isinstance(app.screen, ChoiceScreen))
            await pilot.press(key)
            await settled(app, pilot)
            assert (folder / "judge/final").is_dir() == ("judge" in seen(app)) == restored
        before = (folder / "judge/config.yaml").read_text()
        for answer, text in (("n", "changed"), ("y", before)):
            (folder / "judge/config.yaml").write_text("changed")
            await pilot.press("S")
            await settled(app, pilot, lambda: isinstance(app.screen, ChoiceScreen))
            await pilot.press("enter")
            await settled(app, pilot, lambda: isinstance(app.screen, ConfirmScreen))
            assert "Replace runs/judge" in app.screen._text
            await pilot.press(answer)
            await settled(app, pilot)
            assert (folder / "judge/config.yaml").read_text() == text

    drive(folder, steps)


def test_stages_of_a_whole_run(tmp_path, monkeypatch):
    """The name of a stage's row is the whole run's; a deletion asks which of both is meant."""
    monkeypatch.chdir(tmp_path)
    Path("runs/pipe").mkdir(parents=True)
    Path("runs/pipe/config.yaml").write_text("name: pipe\n")
    for stage in ("sft", "dpo"):
        make(Path("runs/pipe") / stage, 2)

    async def steps(app, pilot):
        await on(app, pilot, "pipe/sft")
        await pilot.press("r")
        await pilot.pause()
        assert app.screen._question == "new name of runs/pipe"
        await typed(pilot, "tube")
        assert sorted(seen(app)) == ["tube/dpo", "tube/sft"]
        await on(app, pilot, "tube/sft")
        await pilot.press("d")
        await settled(app, pilot, lambda: isinstance(app.screen, ChoiceScreen))
        await pilot.press("enter")
        await settled(app, pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await settled(app, pilot)
        assert seen(app) == ["tube/dpo"]
        for keys, left in ((["escape"], 1), (["down", "enter"], 0)):
            await pilot.press("d")
            await settled(app, pilot, lambda: isinstance(app.screen, ChoiceScreen))
            await pilot.press(*keys)
            await settled(app, pilot, lambda: isinstance(app.screen, ConfirmScreen))
            await pilot.press("y")
            await settled(app, pilot)
            assert len(app.shown) == left
        assert not Path("runs/tube").exists()

    drive(Path("runs"), steps)


def test_a_run_in_progress_is_not_touched(folder):
    async def steps(app, pilot):
        with Run.open(folder / "policy"):
            await pilot.press("R")
            await on(app, pilot, "policy")
            assert app.current.state == "running"
            for key in "sd":
                await pilot.press(key)
                await settled(app, pilot, lambda: isinstance(app.screen, ConfirmScreen))
                if key == "d":
                    await pilot.press("y")
                    await pilot.pause()
            assert message_of(app).count("is in use by process") == 2 and not snapshots_of(folder)
        assert (folder / "policy/final").is_dir()

    drive(folder, steps)


def test_an_empty_and_a_damaged_folder(tmp_path):
    async def keys(app, pilot):
        assert not app.shown or app.shown[0].state == "damaged"
        for key in ("enter", "escape", "d", "n", "p", "o"):
            await pilot.press(key)
            await pilot.pause()

    drive(tmp_path / "nothing", keys)
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/run.json").write_text('{"st')
    write_notes(tmp_path / "runs/x", Notes(("a",)))
    assert seen(drive(tmp_path / "runs", keys)) == ["x"]
    assert json.loads((tmp_path / "runs/x/notes.json").read_text())["tags"] == ["a"]
