"""`notes.json`: the tags and the note that a user gives a run. No part of a run reads it."""

import re
from dataclasses import dataclass
from pathlib import Path

from posttrain.base.errors import RunError
from posttrain.base.terminal import escaped
from posttrain.runs.files import load_json, save_json

NAME = "notes.json"
FORMAT = 1
TAG = re.compile(r"[\w.+:/-]{1,40}")
LONGEST = 20_000  # characters of a note


@dataclass(frozen=True, slots=True)
class Notes:
    """Tags in the order they were given, and a text."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_notes(folder: Path) -> Notes:
    """The notes of a run; empty if there are none. Raises RunError if the file is damaged."""
    path = folder / NAME
    if not path.is_file():
        return Notes()
    facts = load_json(path)
    if isinstance(facts, dict) and facts.get("format") == FORMAT:
        tags, note = facts.get("tags"), facts.get("note")
        if isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) and isinstance(note, str):
            return Notes(tuple(tags), note)
    raise RunError(f"{path} is damaged or of another version of posttrain: repair it, or delete it")


def write_notes(folder: Path, notes: Notes) -> None:
    """Replace the notes of a run atomically. Raises RunError for an invalid tag or a note that is too long."""
    for tag in notes.tags:
        if not TAG.fullmatch(tag):
            raise RunError(f"'{escaped(tag)}' is no tag: give 1 to 40 letters, digits or characters of _.+:/-")
    if len(notes.note) > LONGEST:
        raise RunError(f"the note has {len(notes.note):,} characters: at most {LONGEST:,} are kept")
    save_json(folder / NAME, {"format": FORMAT, "tags": list(dict.fromkeys(notes.tags)), "note": notes.note})
