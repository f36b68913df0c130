"""What strangers write (rows, completions, names, models, archives): nothing of it reaches a terminal, a disk or
the memory as they meant it to."""

import json
import os
from pathlib import Path

import pytest

from posttrain.cli import main

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
