"""The child processes of posttrain/base/child.py: deadlines, last words, and an end with their parent."""

import os
import signal
import subprocess
import sys
import time

import pytest

from posttrain.base.child import Child

ECHO = "import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)"


def python(code: str, **settings) -> Child:
    return Child([sys.executable, "-c", code], **settings)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def until(holds, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_lines_go_in_and_out_and_a_missing_one_ends_it():
    """More than a pipe holds is written while nobody reads; the deadline ends what owes a line."""
    with python(ECHO) as child:
        child.send([b"a\n", b"b\n"])
        assert [child.line(20), child.line(20, b"got b")] == [b"got a\n", b"got b\n"]
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            child.line(0.2)
        assert 0.2 <= time.monotonic() - began < 5 and not child.is_alive
    with python("import time; time.sleep(60)") as child:
        child.send([b"x" * 100 + b"\n"] * 10_000)
        with pytest.raises(TimeoutError):
            child.line(0.2)


def test_an_end_is_told_with_its_status_and_last_words():
    with python("import sys; print('one'); sys.exit('it is broken')") as child:
        assert child.line(20) == b"one\n"
        for _ in range(2):
            with pytest.raises(EOFError):
                child.line(20)
        assert (child.status(20), child.last_words()) == (1, "it is broken")
    child.end()
    assert child.last_words() == ""
    with python("import sys; print(sys.stdin.read() == ''); print(2)") as child:
        assert (child.output(20), child.status(20)) == (b"True\n2\n", 0)


def test_grace_is_for_what_reads_its_input():
    with python(ECHO + "\nsys.exit(7)", grace=20.0) as child:
        pass
    assert child.status(0) == 7, "it ended by itself"
    with python("import time; time.sleep(60)", grace=0.2) as child:
        pass
    assert child.status(0) == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_session_is_killed_as_a_whole():
    code = "import subprocess as s, sys; print(s.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    with python(code, session=True) as child:
        grandchild = int(child.line(20))
        assert is_running(grandchild)
    assert until(lambda: not is_running(grandchild))


PARENT = """
import sys, time
from posttrain.base.child import Child
watching = "from posttrain.base.child import end_with_parent as end\\nimport time\\nend()\\ntime.sleep(60)"
reading = "import sys; sys.stdin.read()"
children = [Child([sys.executable, "-c", code], session=True) for code in (watching, reading)]
print(*(child._process.pid for child in children), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_children_end_with_a_parent_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert all(map(is_running, pids))
        parent.send_signal(signal.SIGKILL)
    assert until(lambda: not any(map(is_running, pids)))
