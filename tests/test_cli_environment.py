"""Tokens come from the environment or `.env`, and the environment wins."""

import logging
import os
import signal
from importlib.metadata import version
from pathlib import Path

import pytest

from posttrain.cli import load_tokens, main
from posttrain.cli.command import guarded


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("HF_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY", "OTHER_NAME"):
        monkeypatch.setenv(name, "x")  # so that the fixture takes back what the test sets
        monkeypatch.delenv(name)


def test_tokens_are_read_and_nothing_else(tmp_path):
    file = tmp_path / ".env"
    file.write_text("# mine\nexport HUGGINGFACE_TOKEN='hf_one'\nWANDB_API_KEY = two\nOTHER_NAME=three\nbroken line\n")
    load_tokens(file)
    assert os.environ["HF_TOKEN"] == os.environ["HUGGINGFACE_TOKEN"] == "hf_one"
    assert os.environ["WANDB_API_KEY"] == "two" and "OTHER_NAME" not in os.environ


def test_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "mine")
    (tmp_path / ".env").write_text("HF_TOKEN=other\n")
    load_tokens(tmp_path / ".env")
    assert os.environ["HF_TOKEN"] == "mine"
    load_tokens(tmp_path / "absent")


def test_a_file_with_a_byte_order_mark_and_one_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    file = tmp_path / ".env"
    file.write_text("\ufeffWANDB_API_KEY=two\n", encoding="utf-8")
    load_tokens(file)
    assert os.environ["WANDB_API_KEY"] == "two"

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    load_tokens(file)
    assert "cannot be read: Permission denied" in capsys.readouterr().err


def test_the_log_on_the_console_ends_with_its_command():
    """A program that runs several, such as a notebook, would hear everything as often as it has run one."""
    logger = logging.getLogger("posttrain")
    before = list(logger.handlers)
    assert main(["config", "list"]) == 0
    assert logger.handlers == before


def test_ctrl_c_is_an_interruption_whatever_a_library_makes_of_it(capsys):
    """Hit while it is imported, some raise an ImportError of their own, then or later."""

    def run():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background has another
    try:
        assert guarded(run, debug=False) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert guarded(run, debug=False) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"posttrain {version('posttrain')}\n"
