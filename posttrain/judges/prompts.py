"""The questions to a judge, in the style of MT-Bench (Zheng et al. 2023, arXiv 2306.05685, figures 5 to 10): they ask
for a short explanation, then the verdict in double square brackets. Also reads the score or preference in a reply."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.base.files import table_beside
from posttrain.base.words import filled
from posttrain.config.schema.judge import ScoreSettings
from posttrain.grading.extract import after_thinking, last_number

TEXTS = table_beside(__file__, "prompts.yaml")

Prompt = str | Sequence[Mapping[str, Any]]
_RATING = re.compile(r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]")
_OUT_OF = re.compile(r"\s*/\s*\d+(?:\.\d+)?")  # 7/10 means 7
_PREFERENCE = re.compile(r"\[\[([ABC])\]\]")
MOST_OBJECTS = 100  # maximum number of braces in a reply at which a JSON object is sought


def built_in(name: str, answer: str | None) -> str:
    """A question of prompts.yaml, with a field for the reference answer (`{answer}`) if there is one."""
    parts = {part: TEXTS[part] * (answer is not None) for part in ("reference", "reference_rule")}
    return filled(TEXTS[name], parts)


def as_text(prompt: Prompt) -> str:
    """A prompt as one string. A single user message becomes its content; other conversations include the roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0].get("role") == "user":
        return str(prompt[0].get("content") or "")
    return "\n\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in prompt)


def read_score(text: str, settings: ScoreSettings) -> float | None:
    """The score in a reply, after its thinking; None if it has no score from min_score to max_score."""
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
    """The last verdict in double brackets after the thinking: A, B, or C for a tie; None if there is no verdict."""
    return next(reversed(_PREFERENCE.findall(after_thinking(text))), None)


def _field(text: str, name: str) -> Any:
    """The value of this field in the last JSON object of the text that has it."""
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
