"""Functions as rewards: deadlines, retries, async ones, and where their prints go. Nothing waits for long."""

import io
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from posttrain.base.console import PlainConsole, bar
from posttrain.base.errors import RewardError
from posttrain.config.reading.files import read_settings
from posttrain.config.schema.rewards import PythonReward, Reward
from posttrain.rewards import calls, python
from posttrain.rewards.calls import OverdueError
from posttrain.rewards.compose import RewardInput, Rewards
from posttrain.rewards.parts import TrainerState
from posttrain.rewards.python import RewardFunction, call_function
from posttrain.runs.logs import ConsoleLog, RunLog
from posttrain.training.evaluation import parts_of
from posttrain.training.saving import GivenUpError, Stop

MODULE = """
import asyncio, logging, sys, threading
log = logging.getLogger("my_slow_rewards")
log.addHandler(logging.StreamHandler())
calls, seen, free = [], [], threading.Event()

def stuck(completions):
    calls.append(1)
    free.wait(20)
    return [1.0] * len(completions)

def stuck_at_first(completions):
    return stuck(completions) if not calls else [2.0] * len(completions)

def fails_twice(completions):
    calls.append(1)
    if len(calls) <= 2:
        raise TimeoutError("busy")
    return [3.0] * len(completions)

async def together(completions):
    async def one(text):
        seen.append((asyncio.get_running_loop(), threading.current_thread()))
        await asyncio.sleep(0)
        return float(len(text))
    return await asyncio.gather(*map(one, completions))

async def waits_at_first(completions):
    seen.append(asyncio.get_running_loop())
    try:
        await asyncio.sleep(20 if len(seen) == 1 else 0)
    finally:
        calls.append(1)
    return [4.0] * len(completions)

async def leaves(completions):
    async def inside():
        sys.exit("no more")
    await asyncio.gather(inside())

def talks(completions, prompts):
    print("half ", end="")
    print("a line")
    print("to\\x1b[2J stderr", file=sys.stderr)
    log.warning("by a logger")
    other = threading.Thread(target=prompts[0])
    other.start()
    other.join()
    print("unfinished", end="")
    return [0.0] * len(completions)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`my_slow_rewards` in the working folder; what still waits in it at the end is let go."""
    (tmp_path / "my_slow_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_slow_rewards", raising=False)
    monkeypatch.setattr(python, "PAUSE_S", 0.01)
    yield lambda: sys.modules["my_slow_rewards"]
    if "my_slow_rewards" in sys.modules:
        sys.modules["my_slow_rewards"].free.set()
        logging.getLogger("my_slow_rewards").handlers.clear()


def function(name: str, timeout: float | None = None, retries: int = 0):
    return closing(RewardFunction(f"my_slow_rewards:{name}", timeout, retries))


TWO = {"completions": ["a", "bc"], "prompts": ["", ""], "answer": [None, None]}


def test_no_answer_in_time_is_no_reward(module, caplog):
    """Not the sum of the others either; and the next call is answered."""
    terms = [
        {"type": "python", "function": "my_slow_rewards:stuck_at_first", "timeout": 0.2, "name": "late"},
        {"type": "length", "target": 3},
    ]
    completions = [RewardInput("a", [1]), RewardInput("b", [2, 3])]
    with Rewards(TypeAdapter(tuple[Reward, ...]).validate_python(terms)) as rewards:
        found, after = rewards(completions), rewards(completions)
    metrics = found.metrics()
    assert found.totals == (None, None) and "reward" not in metrics and "rewards/late/mean" not in metrics
    assert (metrics["rewards/late/timeout"], metrics["rewards/left_out"]) == (2, 2)
    said = "my_slow_rewards:stuck_at_first did not return within 0.2 s: no reward for 2 completions"
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", said)]
    assert [reward.parts[0].value for reward in after] == [2.0, 2.0] and after.metrics()["rewards/late/timeout"] == 0


def test_exceptions_and_timeouts_are_tried_again(module, caplog):
    with function("fails_twice", retries=2) as reward:
        assert reward(TWO) == [3.0, 3.0]
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("my_slow_rewards:fails_twice failed (my_slow_rewards.py line ")
    assert [text.partition("busy: ")[2] for text in said] == [
        "called again in 0.01 s, 2 retries left",
        "called again in 0.02 s, 1 retry left",
    ]
    module().calls.clear()
    for timeout in (None, 20.0):  # in this thread, and in another
        module().calls.clear()
        with (
            function("fails_twice", timeout, retries=1) as reward,
            pytest.raises(RewardError, match="TimeoutError: busy"),
        ):
            reward(TWO)
        assert len(module().calls) == 2
    module().calls.clear()
    with function("stuck_at_first", timeout=0.2, retries=1) as reward:
        assert reward(TWO) == [2.0, 2.0]


def test_calls_that_run_on_are_few(module, monkeypatch):
    """Beside so many the function is not called again, until one has ended."""
    monkeypatch.setattr(calls, "MOST_LATE", 2)
    with function("stuck", timeout=0.1) as reward:
        for message in ("did not return within 0.1 s", "did not return", "was not called: 2 earlier calls"):
            with pytest.raises(OverdueError, match=message):
                reward(TWO)
        assert len(module().calls) == 2
        module().free.set()
        reward.timeout = 20.0
        assert reward(TWO) == [1.0, 1.0]


def test_async_functions_are_awaited_in_one_loop(module):
    with function("together") as reward:
        assert reward(TWO) == [1.0, 2.0] == reward(TWO)
    assert len(set(module().seen)) == 1


def test_async_functions_are_cancelled_at_their_deadline(module):
    with function("waits_at_first", timeout=0.2) as reward:
        with pytest.raises(OverdueError):
            reward(TWO)
        assert module().calls, "it goes on after its deadline"
        reward.timeout = 20.0
        assert reward(TWO) == [4.0, 4.0] and len(set(module().seen)) == 1


def test_sys_exit_in_a_task_is_no_wait_without_end(module):
    with function("leaves") as reward, pytest.raises(SystemExit, match="no more"):
        reward(TWO)


def test_a_signal_is_answered_while_a_call_is_waited_for(module):
    stop, began = Stop(), time.monotonic()
    press = threading.Timer(0.1, os.kill, (os.getpid(), 2))
    with function("stuck", timeout=20.0) as reward, stop.listening(), pytest.raises(GivenUpError), stop.giving_up():
        press.start()
        reward(TWO)
    assert time.monotonic() - began < 15, "the call waits 20 s"


def test_a_call_that_runs_on_does_not_keep_the_process(module):
    code = (
        "from posttrain.rewards.python import RewardFunction\n"
        "RewardFunction('my_slow_rewards:stuck', 0.05)({'completions': ['']})"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "OverdueError: my_slow_rewards:stuck did not return" in done.stderr
    assert time.monotonic() - began < 15, "the call takes 20 s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_prints_go_above_the_bar_and_into_the_log(module, tmp_path, monkeypatch, timeout):
    """With the function's name, a line each, harmless; the bar is drawn meanwhile, where it was."""
    screen, log = Terminal(), RunLog(tmp_path / "training.log")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", screen)
    with closing(log), closing(ConsoleLog()), function("talks", timeout) as reward:
        shown = bar(PlainConsole(stderr=True))
        shown.add_task("training", total=3)
        with shown:
            reward(TWO | {"prompts": [shown.refresh, shown.refresh]})
            assert sys.stderr is not screen
        assert sys.stderr is screen and sys.stdout.getvalue() == ""
    said = ["half a line", "to\\x1b[2J stderr", "by a logger", "unfinished"]
    lines = [line.partition(" INFO ")[2] for line in (tmp_path / "training.log").read_text().splitlines()]
    assert lines == [f"my_slow_rewards:talks: {text}" for text in said]
    drawn = screen.getvalue()
    assert "\x1b[2J" not in drawn and "training" in drawn
    for text in said:
        assert drawn.count(text) == 1 and f"\x1b[2Kmy_slow_rewards:talks: {text}\n" in drawn, (text, drawn)


def test_prints_stay_where_they_are_without_a_log(module, capsys):
    with function("talks") as reward:
        reward(TWO | {"prompts": [int, int]})
    assert capsys.readouterr().out == "half a line\nunfinished"


@pytest.mark.parametrize("more", [{"timeout": 0}, {"timeout": 1e9}, {"retries": -1}, {"retries": True}])
def test_settings_that_cannot_be(more):
    with pytest.raises(ValidationError, match=next(iter(more))):
        PythonReward.model_validate({"type": "python", "function": "a:b"} | more)


# --- what a function may change ---------------------------------------------------------------------------------------

CHANGING = """
import asyncio, os, sys, torch

def moves(completions, folder):
    os.chdir(folder[0])
    return [1.0] * len(completions)

def loses_its_folder(completions, folder):
    os.chdir(folder[0]), os.rmdir(folder[0])
    return [1.0] * len(completions)

def moves_and_fails(completions, folder):
    os.chdir(folder[0])
    raise ValueError("no")

async def moves_later(completions, folder):
    await asyncio.sleep(0)
    return moves(completions, folder)

def doubles(completions):
    torch.set_default_dtype(torch.float64)
    return [1.0] * len(completions)

def switches(completions):
    torch.set_grad_enabled(False)
    return [1.0] * len(completions)

def places(completions):
    torch.set_default_device("meta")
    return [1.0] * len(completions)

def recurses(completions):
    sys.setrecursionlimit(sys.getrecursionlimit() + 7)
    return [1.0] * len(completions)

def forks(completions):
    global child
    child = os.fork()
    return [1.0 if child else 2.0] * len(completions)

def forks_and_fails(completions):
    global child
    child = os.fork()
    if child == 0:
        raise ValueError("in the child")
    return [1.0] * len(completions)

async def forks_later(completions):
    await asyncio.sleep(0)
    return forks(completions)
"""


@pytest.fixture
def changing(tmp_path, monkeypatch):
    (tmp_path / "changing_rewards.py").write_text(CHANGING)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "changing_rewards", raising=False)
    columns = {"completions": ["a", "bc"], "folder": [str(tmp_path / "other")] * 2}

    def call(name: str, timeout: float | None) -> list[float | None]:
        with closing(RewardFunction(f"changing_rewards:{name}", timeout)) as function:
            return function(columns)

    return call


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize("name", ["moves", "moves_later", "loses_its_folder", "moves_and_fails"])
def test_the_working_directory_is_set_back(changing, tmp_path, caplog, name, timeout):
    if name == "moves_and_fails":
        with pytest.raises(RewardError, match=r"failed .* with ValueError: no"):
            changing(name, timeout)
    else:
        assert changing(name, timeout) == [1.0, 1.0]
    assert os.getcwd() == str(tmp_path)
    assert f"changing_rewards:{name} changed the working directory to " in caplog.text


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("doubles", "torch's default dtype from torch.float32 to torch.float64"),
        ("switches", "torch's gradient mode from True to False"),
        ("places", "torch's default device from cpu to meta"),
        ("recurses", "the recursion limit from "),
    ],
)
def test_settings_that_training_relies_on_are_an_error_and_set_back(changing, name, what, timeout):
    before = torch.get_default_dtype(), torch.is_grad_enabled(), sys.getrecursionlimit(), torch.get_default_device()
    with pytest.raises(RewardError, match=f"changing_rewards:{name} changed {what}.*, which the run relies on"):
        changing(name, timeout)
    after = torch.get_default_dtype(), torch.is_grad_enabled(), sys.getrecursionlimit(), torch.get_default_device()
    assert after == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.parametrize("name", ["forks", "forks_and_fails", "forks_later"])
def test_a_forked_child_that_returns_ends(changing, capfd, name, timeout):
    assert changing(name, timeout) == [1.0, 1.0]
    _, status = os.waitpid(sys.modules["changing_rewards"].child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert f"changing_rewards:{name} has forked a process that returned" in capfd.readouterr().err


# --- whose functions --------------------------------------------------------------------------------------------------

LIBRARY = ["shutil:rmtree", "os:remove", "os.path:exists", "posix:system", "builtins:eval", "importlib:import_module"]
LIBRARY += [
    "yaml:unsafe_load",
    "numpy.ctypeslib:load_library",
    "posttrain.rewards.python:call_function",
    "antigravity:fly",
]
IMPORTED = ["rmtree", "Path", "remove", "later", "copied"]


@pytest.mark.parametrize("name", LIBRARY + [f"whose_rewards:{name}" for name in IMPORTED])
def test_functions_of_libraries_are_refused_and_not_imported(tmp_path, monkeypatch, name):
    """Settings may be a stranger's: `rows: shutil:rmtree` with a folder as source would delete it."""
    (tmp_path / "whose_rewards.py").write_text(
        "import functools, os\nfrom pathlib import Path\nfrom shutil import rmtree\nremove = os.remove\n"
        "later = functools.partial(rmtree)\ncopied = functools.partial(functools.partial(os.unlink))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "whose_rewards", raising=False)
    (tmp_path / "kept").mkdir()
    with pytest.raises(RewardError, match=r"belongs to Python or to an installed package .* entry point"):
        call_function(name, str(tmp_path / "kept"), "test")
    assert (tmp_path / "kept").is_dir() and "antigravity" not in sys.modules


def test_functions_of_the_users_files(tmp_path, monkeypatch):
    """In the current folder, beside a settings file that was read, and where an entry point names one; nowhere else."""
    for folder in ("here", "beside", "elsewhere"):
        (tmp_path / folder).mkdir()
        lines = (
            f"import functools\n@functools.cache\ndef own(*_):\n    return {folder!r}\npart = functools.partial(own)\n"
        )
        (tmp_path / folder / f"of_{folder}.py").write_text(lines)
    (tmp_path / "beside/suite.yaml").write_text("source: rows.jsonl\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "elsewhere")])
    assert call_function("of_here:own") == call_function("of_here:part") == "here"
    with pytest.raises(RewardError, match="no module of_beside"):
        call_function("of_beside:own")
    read_settings(tmp_path / "beside/suite.yaml")
    assert call_function("of_beside:own") == "beside"
    with pytest.raises(RewardError, match="neither in the current folder nor next to the settings file"):
        call_function("of_elsewhere:own")
    offered = SimpleNamespace(value="of_elsewhere:own")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [offered])
    assert call_function("of_elsewhere:own") == "elsewhere"
    (tmp_path / "here/of_beside.py").write_text("def own():\n    return 'another'\n")
    with pytest.raises(RewardError, match=r"was already imported from "):
        call_function("of_beside:own")


def test_functions_of_the_program_that_calls(tmp_path, monkeypatch):
    """A script's own folder is the user's; that of the `posttrain` command, of a package or of Python is not."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "of_the_program.py").write_text("def short(completions):\n    return [1.0] * len(completions)\n")
    for program in (Path(python.__file__).parents[1] / "__main__.py", Path(sys.executable).with_name("posttrain")):
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)
            with pytest.raises(RewardError, match="there is no module of_the_program"):
                python.find_function("of_the_program:short")
            with pytest.raises(RewardError, match="there is no module signals"):
                python.find_function("signals:handling")  # of our package's folder
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "program.py"), raising=False)
    assert python.find_function("of_the_program:short")(completions=["a"]) == [1.0]
    assert python.find_function("./of_the_program.py:short") is python.find_function("of_the_program:short")
    (tmp_path / "of_a_folder").mkdir()
    (tmp_path / "of_a_folder/deep.py").write_text("def deep(completions):\n    return [2.0]\n")
    assert python.find_function("of_a_folder/deep.py:deep")(completions=["a"]) == [2.0]
    with pytest.raises(RewardError, match="there is no module of_no_file"):
        python.find_function("of_no_file.py:short")


NOTING = """
def noting(completions, trainer_state, log_extra, log_metric, **columns):
    log_extra("length", [len(text) for text in completions])
    log_extra("odd", [object() if index else None for index, _ in enumerate(completions)])
    log_metric("share", 0.25)
    log_metric("share", 0.75)
    return [float(trainer_state.global_step)] * len(completions)


def miscounting(completions, log_extra):
    log_extra("length", [1])
    return [0.0] * len(completions)


def tried(completions, log_metric, calls=[]):
    calls.append(1)
    log_metric("calls", len(calls))
    if len(calls) < 2:
        raise OSError("busy")
    return [0.0] * len(completions)
"""


@pytest.fixture
def noting(tmp_path, monkeypatch):
    (tmp_path / "my_notes.py").write_text(NOTING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_notes", raising=False)
    monkeypatch.setattr(python, "PAUSE_S", 0.01)


def test_a_function_logs_as_in_trl(noting):
    """Values of completions are kept with them, metrics are averaged, and the state says how far training is."""
    terms = [{"type": "python", "function": "my_notes:noting"}, {"type": "length", "target": 3}]
    completions = [RewardInput("abc", [1]), RewardInput("d", [2, 3])]
    with Rewards(TypeAdapter(tuple[Reward, ...]).validate_python(terms)) as rewards:
        found, after = rewards(completions, TrainerState(7, 10, 0.5)), rewards(completions)
    [first, second] = [reward.parts[0] for reward in found]
    assert first.value == 7.0 and first.extra["length"] == 3 and second.extra["length"] == 1
    assert first.extra["odd"] is None and "object" in second.extra["odd"], "plain data"
    name = first.name
    assert found.metrics()[f"rewards/{name}/share"] == 0.5 and after[0].parts[0].value == 0.0
    assert parts_of(found[1])[name]["extra"] == second.extra and "extra" not in parts_of(found[1])["length"]


def test_another_number_of_values_is_an_error(noting):
    with (
        closing(RewardFunction("my_notes:miscounting")) as function,
        pytest.raises(RewardError, match=r"line 11.*log_extra\('length'\) has 1 values for 2 completions"),
    ):
        function(TWO)


def test_what_a_failed_try_logged_does_not_count(noting):
    with closing(RewardFunction("my_notes:tried", retries=1)) as function:
        _, notes = function.noted(TWO, TrainerState())
    assert notes.metrics == {"calls": 2.0}
