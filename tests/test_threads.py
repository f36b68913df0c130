"""OpenMP's threads sleep while other processes want the cores, and spin while none does (posttrain/base/threads.py)."""

import json
import os
import subprocess
import sys

import pytest

from posttrain.base.threads import CALM, CALM_INTERVALS, CONTENDED, CoreMonitor, sharing_cores, waited

pytestmark = pytest.mark.skipif(waited() is None, reason="needs Linux's scheduler statistics (/proc/self/task)")

# Two threads: those that sleep give their core up at every region, which the system counts.
PROGRAM = """
import json, resource, subprocess, sys, threading, time
import torch
from posttrain.base.threads import CALM_INTERVALS, CoreMonitor, _libgomp, sharing_cores, team_beside

def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(1000):
        numbers.add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

def names():
    return {thread.name for thread in threading.enumerate()}

numbers = torch.ones(1 << 17)
work()
watch = CoreMonitor(_libgomp(), team_beside(2))
found = {"spinning": min(work() for _ in range(5))}  # beside other work the system takes a core away at times
watch.update(1.0)
while work() < 1000:  # until the team is there
    pass
found["sleeping"] = work()
for _ in range(CALM_INTERVALS):
    watch.update(0.0)
found["spinning again"] = min(work() for _ in range(5))

busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
try:
    with sharing_cores():
        end = time.monotonic() + 20
        while "posttrain-team" not in names() and time.monotonic() < end:
            work()
        found["beside busy processes"] = sorted(names() - {"MainThread"})
    found["after the block"] = sorted(names() - {"MainThread"})
finally:
    for process in busy:
        process.kill()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_threads_sleep_beside_busy_processes():
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["sleeping"] >= 1000  # at each of 1,000 regions a thread gave its core up
    assert found["spinning"] < 500 and found["spinning again"] < 500
    assert found["beside busy processes"] == ["posttrain-cores", "posttrain-team"]
    assert found["after the block"] == []


def test_when_threads_sleep_and_spin_again(monkeypatch):
    monkeypatch.setattr(CoreMonitor, "_sleep", lambda self: None)
    watch = CoreMonitor(None, 2)
    watch.update(CONTENDED - 0.01)
    assert watch.team is None
    watch.update(CONTENDED + 0.01)
    assert watch.team is not None
    for share in (CALM - 0.01,) * (CALM_INTERVALS - 1) + (CALM + 0.01,) + (CALM - 0.01,) * (CALM_INTERVALS - 1):
        watch.update(share)
        assert watch.team is not None  # calm for too short a time
    watch.update(CALM - 0.01)
    assert watch.team is None


def test_a_thread_that_ends_while_it_is_looked_at_has_waited_for_nothing(monkeypatch, tmp_path):
    """Else the next look would take all that was waited so far for the last interval's."""
    for name, text in (("1", "5 700 1\n"), ("2", None)):
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "schedstat").write_text(text)
    monkeypatch.setattr("posttrain.base.threads.TASKS", tmp_path)
    assert waited() is None  # a thread is there, and its numbers are not: the system does not count
    (tmp_path / "2").rmdir()
    listed = [tmp_path / "1", tmp_path / "2"]
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda self: iter(listed))
    assert waited() == 700


def test_one_thread_or_a_choice_of_the_users_is_left_alone(monkeypatch):
    import threading

    import torch

    def watches() -> int:  # not all threads: those of other tests may end meanwhile
        return sum(isinstance(one, CoreMonitor) for one in threading.enumerate())

    before = watches()
    assert torch.get_num_threads() == 1  # conftest.py
    with sharing_cores():
        assert watches() == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with sharing_cores():
        assert watches() == before + 1
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    with sharing_cores():
        assert watches() == before
