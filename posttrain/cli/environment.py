"""Tokens from `.env`: HF_TOKEN (or HUGGINGFACE_TOKEN) and WANDB_API_KEY. Read into the environment, written nowhere."""

import os
from pathlib import Path

from posttrain.terminal import say

NAMES = ("HF_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY")


def load_tokens(file: Path) -> None:
    """Set those of NAMES that are in the file's `NAME=value` lines and not in the environment yet."""
    if file.is_file():
        try:
            text = file.read_text(encoding="utf-8-sig", errors="replace")
        except OSError as error:
            say(f"warning: {file} cannot be read: {error.strerror}", error=True)
            text = ""
        for line in text.splitlines():
            name, separator, value = line.removeprefix("export ").partition("=")
            if separator and name.strip() in NAMES:
                os.environ.setdefault(name.strip(), value.strip().strip("'\""))
    if token := os.environ.get("HUGGINGFACE_TOKEN"):
        os.environ.setdefault("HF_TOKEN", token)  # the name that the hub's library reads
