"""Reads a judge's reply: a score, or which of two answers is better."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from posttrain.config.schema.judge import ScoreSettings
from posttrain.grading.extract import after_thinking, last_number

_RATING = re.compile(r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]")
_OUT_OF = re.compile(r"\s*/\s*\d+(?:\.\d+)?")  # 7/10 is a 7
_PREFERENCE = re.compile(r"\[\[([ABC])\]\]")
MOST_OBJECTS = 100  # braces of a reply that may open a JSON object


def read_score(text: str, settings: ScoreSettings) -> float | None:
    """The score in a reply, after its thinking; None if there is none from min_score to max_score."""
    text = after_thinking(text)
    match settings.read:
        case "rating":
            found = next(reversed(_RATING.findall(text)), None)
        case "number":
            found = last_number(_OUT_OF.sub("", text))
        case "json":
            found = _field(text, settings.field or "score")
        case "regex":
            matches = list(re.finditer(settings.pattern or "", text))
            found = matches[-1][1] if matches else None
    score = _number(found)
    return score if score is not None and settings.min_score <= score <= settings.max_score else None


def read_preference(text: str) -> str | None:
    """A, B, or C for a tie: the last one in double brackets after the thinking; None if there is none."""
    return next(reversed(_PREFERENCE.findall(after_thinking(text))), None)


def _field(text: str, name: str) -> Any:
    """The field of the last JSON object that has it, wherever in the text that stands."""
    decoder, found, at = json.JSONDecoder(), None, text.find("{")
    for _ in range(MOST_OBJECTS):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(text, at)
            found = value.get(name, found)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value.replace(",", "").strip(" $%") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
