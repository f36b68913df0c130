"""The best and the worst completions of a run, with the parts of their rewards and the text that rules matched."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.base.errors import PosttrainError
from posttrain.base.terminal import harmless
from posttrain.base.words import counted
from posttrain.reports.markup import Markup, el, join, number
from posttrain.reports.page import Html, cut
from posttrain.runs.files import as_mapping
from posttrain.runs.rollouts import NAME
from posttrain.runs.stored_rollouts import StoredRun

SHOWN = 3  # number of best completions, and of worst
LONGEST, LONGEST_PROMPT = 4_000, 1_500  # maximum characters of a completion, and of a prompt
# The defaults of `data.tags`, and below the tags of r1_zero.
TAGS = {"reasoning_end": "<end_working_out>", "solution_start": "<SOLUTION>", "solution_end": "</SOLUTION>"}
TAGGED = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")
R1_ZERO = ("</think>", "<answer>", "</answer>")
NOTE = " Marked: the tags that a format reward counts, and (underlined) the answer that a rule extracted."

Span = tuple[int, int, str]  # from, to, class


def completions(folder: Path, config: Mapping[str, Any], missing: list[str], count: int = SHOWN) -> Iterator[Html]:
    """Yield a section for the last stored step and for each data set's last evaluation; none without stored rollouts.
    A message about what cannot be read is added to `missing`."""
    if not (folder / NAME).is_file():
        return
    try:
        with StoredRun(folder, looking=True) as stored:
            extremes = [(f"step {step:,}", stored.extremes(step, count)) for step in stored.steps()[-1:]]
            for step, dataset in stored.last_evaluations():
                extremes.append((f"{dataset} at step {step:,}", stored.extremes(step, count, dataset)))
    except (PosttrainError, OSError) as error:
        missing.append(f"Completions are not shown: {error}")
        return
    tags = _tags_of(config)
    for when, ends in extremes:
        sides = [
            el("div", el("h3", name), *(_item(row, tags) for row in rows))
            for name, rows in zip(("Best", "Worst"), ends, strict=True)
        ]
        body = el("div", *sides, class_="columns")
        yield Html(f"Completions, {when}", body, f"By reward, one per prompt.{NOTE if '<mark' in body else ''}")


def _tags_of(config: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """The tags that each reward of the run searches for, by the name of the reward."""
    data = as_mapping(config.get("data"))
    tags = [str(as_mapping(data.get("tags")).get(name) or tag) for name, tag in TAGS.items()]
    by_reward: dict[str, Sequence[str]] = {}
    for reward in config.get("rewards") or []:
        kind = reward.get("type") if isinstance(reward, Mapping) else reward
        if kind in TAGGED or kind == "r1_zero":
            by_reward[str(as_mapping(reward).get("name") or kind)] = R1_ZERO if kind == "r1_zero" else tags
    return by_reward


def _item(row: Mapping[str, Any], tags: Mapping[str, Sequence[str]]) -> Markup:
    parts, facts = as_mapping(row["parts"]), as_mapping(row.get("facts"))
    about = [counted(row["length"], "token")] if row["length"] is not None else []
    if row.get("advantage") is not None:
        about.append(f"advantage {row['advantage']:+.3g}")
    if isinstance(facts.get("answer"), str):
        about.append(f"right answer {facts['answer'][:80]}")
    text = harmless(str(row["completion"]))  # before the text is cut: a cut may split a secret
    head = [
        el("span", "reward ", el("span", number(row["reward"]), class_="reward")),
        el("span", " · ".join(about), class_="quiet"),
        el("span", "truncated", class_="badge alarm") if row["finish_reason"] == "length" else None,
    ]
    return el(
        "article",
        el("p", *head, class_="head"),
        el("p", cut(str(row["prompt"]), LONGEST_PROMPT), class_="prompt"),
        el("pre", marked(text, spans(text, parts, tags))),
        el("ul", *(_part(name, part) for name, part in parts.items()), class_="parts"),
        class_="item",
    )


def _part(name: str, part: object) -> Markup:
    """A part of the reward: its name, its value, its weight if that is not 1, and a rule's verdict."""
    facts = as_mapping(part)
    value, weight, verdict = facts.get("value"), facts.get("weight", 1.0), facts.get("verdict")
    text = f"{name} {'none' if value is None else f'{value:+.3g}'}"
    text += "" if weight in (1.0, None) else f" × {weight:g}"
    text += f", {verdict}" if verdict else ""
    text += f": {facts['reason']}" if facts.get("reason") else ""
    sign = None if not isinstance(value, int | float) else "plus" if value > 0 else "minus" if value < 0 else None
    return el("li", text, class_=sign)


def spans(text: str, parts: Mapping[str, Any], tags: Mapping[str, Sequence[str]]) -> Iterator[Span]:
    """The text that rules matched: tags that occur exactly once, and the last occurrence of each extracted answer."""
    for tag in dict.fromkeys(tag for name in parts for tag in tags.get(name, ())):
        if tag and text.count(tag) == 1:
            at = text.index(tag)
            yield at, at + len(tag), "tag"
    for part in parts.values():
        answer = as_mapping(part).get("extracted")
        answer = answer.strip() if isinstance(answer, str) else ""
        if answer and (at := text.rfind(answer)) >= 0:
            yield at, at + len(answer), "answer"


def marked(text: str, matches: Iterable[Span]) -> Markup:
    """The string with its spans marked; long parts between them are cut. Of overlapping spans, the first is marked."""
    pieces: list[object] = []
    done, room = 0, LONGEST
    for start, end, kind in sorted(set(matches)):
        if start < done:
            continue
        pieces += [cut(text[done:start], room), el("mark", text[start:end], class_=kind)]
        room = max(200, room - (start - done))
        done = end
    return join([*pieces, cut(text[done:], room)])
