"""A signal is not lost where Python drops the exception that its handler raises (posttrain/base/signals.py)."""

import contextlib
import os
import signal
import sys
import time

import pytest

from posttrain.base.errors import Stopped
from posttrain.base.signals import deferring, handling, leave
from posttrain.training.saving import GivenUpError, LeaveAtOnceError, Stop


class Signalled:
    """An object in whose destructor a signal arrives: what its handler raises there is dropped."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.001)


def signal_in_destructor(number: int, wait_s: float = 30.0) -> None:
    thing = Signalled(number)
    del thing
    time.sleep(wait_s)  # cut short by what is raised


def test_an_exception_dropped_in_a_destructor_is_raised_again():
    began = time.monotonic()
    with pytest.raises(Stopped) as raised, handling(leave, signal.SIGTERM):
        signal_in_destructor(signal.SIGTERM)
    assert raised.value.code == 128 + signal.SIGTERM and time.monotonic() - began < 20


def test_the_handler_is_asked_once():
    with deferring("saving") as came:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):  # the second one leaves at once
            signal_in_destructor(signal.SIGINT)
    assert came == [signal.SIGINT]


def test_what_others_drop_is_reported_as_before(monkeypatch):
    class Broken:
        def __del__(self) -> None:
            raise ValueError("of its own")

    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    with handling(leave, signal.SIGTERM):
        thing = Broken()
        del thing
    assert seen == ["of its own"]


def test_a_run_gives_up_what_it_does_for_a_dropped_signal():
    stop = Stop()
    with stop.listening():
        with pytest.raises(GivenUpError), stop.giving_up():
            signal_in_destructor(signal.SIGINT)
        time.sleep(0.05)
        with pytest.raises(LeaveAtOnceError):
            signal_in_destructor(signal.SIGINT)


def test_a_block_that_ended_meanwhile_is_not_given_up_again():
    """The block itself raises at its end, before the signal comes again: nothing more is raised behind it."""
    stop = Stop()
    with stop.listening():
        with pytest.raises(GivenUpError), stop.giving_up():
            signal_in_destructor(signal.SIGINT, wait_s=0)
        time.sleep(0.1)
    assert stop.requested


def test_an_exception_that_other_code_catches_is_raised_by_the_next_block():
    def swallowing() -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)

    entered = False
    with pytest.raises(Stopped), handling(leave, signal.SIGTERM):
        swallowing()
        with handling(leave, signal.SIGINT):
            entered = True
        with deferring("saving"):
            pytest.fail("a run would begin")
    assert entered, "another signal's block is entered"


def test_cleaning_up_after_an_exception_may_handle_signals():
    entered = []
    with pytest.raises(Stopped), handling(leave, signal.SIGTERM):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            with deferring("saving"):
                entered.append(1)
    with handling(leave, signal.SIGTERM):
        entered.append(2)
    assert entered == [1, 2]
