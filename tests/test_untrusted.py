"""What strangers write (rows, completions, names, models, archives): nothing of it reaches a terminal, a disk or
the memory as they meant it to."""

import json
import os
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.config import ModelConfig

# --- files that are there ---------------------------------------------------------------------------------------------

WRITERS = {
    "score": ["MODEL", "rows.jsonl", "--template", "none"],
    "generate": ["MODEL", "rows.jsonl", "--max-completion-length", "2"],
    "grade": ["rows.jsonl", "--reward", "math", "--workers", "1", "--deadline", "20"],
}


@pytest.mark.parametrize("verb", WRITERS)
def test_files_that_are_there_are_kept(verb, tmp_path, monkeypatch, shared, capsys):
    """Neither the input, by any path or link, nor an earlier output, is written over; the latter with --overwrite."""
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "Once", "completion": r"\boxed{1}", "answer": "1"}
    Path("rows.jsonl").write_text(json.dumps(row))
    os.link("rows.jsonl", "link.jsonl")
    Path("there.jsonl").write_text("earlier")
    command = [verb, *(str(shared / "models/stories260K") if word == "MODEL" else word for word in WRITERS[verb])]
    for name, words in (("link.jsonl", "it is a file that is read"), ("there.jsonl", "there.jsonl exists: replace")):
        assert main([*command, "--output", name]) == 1
        assert words in capsys.readouterr().err
    assert main([*command, "--output", "link.jsonl", "--overwrite"]) == 1
    assert json.loads(Path("rows.jsonl").read_text()) == row and Path("there.jsonl").read_text() == "earlier"
    assert main([*command, "--output", "there.jsonl", "--overwrite"]) == 0
    assert json.loads(Path("there.jsonl").read_text()).items() >= row.items()


# --- names ------------------------------------------------------------------------------------------------------------

NAMES = [".", "..", "...", " ", "a/b", "a\\b", "a\x1b[2J", "a\rb", "a\x9b", "a\u202eb", "a\nb", "\0"]
NAMES += ["a" * 300, "é" * 101]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_name_no_folder_are_refused_at_once(name, tmp_path, monkeypatch, capsys):
    """Of runs, models and projects, by what the schema says; before anything is loaded or written, dry run or not."""
    monkeypatch.chdir(tmp_path)
    for setting in ("name", "model.name", "tracking.project"):
        settings = ["model.path=absent", "method=sft", "data.source=absent.jsonl", "tracking.report_to=wandb"]
        given = f"{setting}={json.dumps(name)}"
        for command in (["train"], ["train", "--dry-run"], ["plan"]):
            assert main([*command, *settings, given]) == 1
            words = f"{setting} is {ascii(name)[:40]}" if name.isascii() else f"{setting} is "
            error = capsys.readouterr().err
            assert words in error and "it must be text of at most 200 bytes that can name a folder" in error
    assert list(tmp_path.iterdir()) == []


def test_the_last_part_of_a_model_s_path_names_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ModelConfig(path=".").folder_name == tmp_path.name
    assert ModelConfig(path="a/../../").folder_name == tmp_path.parent.name
    for path in ("/", "models/a\x1b[2J", "a" * 300):
        given = f"model.path={json.dumps(path)}"
        assert main(["train", "method=sft", "data.source=absent.jsonl", "--dry-run", given]) == 1
        assert "whose last part cannot name a folder; give the model a name" in capsys.readouterr().err
