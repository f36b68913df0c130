"""A comparison as tables in 80 columns, `compare.json` and `compare.html`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from posttrain import __version__
from posttrain.base.console import cells_of, numbers_table
from posttrain.base.words import counted
from posttrain.evaluation.comparing.differences import Comparison, Difference, Flip, Suite, interval, p_text, verdict
from posttrain.evaluation.comparing.judged import Judged, judged_facts, judged_sections, judged_table, sentences
from posttrain.evaluation.records import Answer
from posttrain.reports import page as pages
from posttrain.reports.chart import COLOURS, Interval, intervals
from posttrain.reports.drawing import Drawing, write_drawings
from posttrain.runs.files import make_folder, save_json
from posttrain.runs.provenance import now

FORMAT = 1
FLIPS_SHOWN = 50  # on the page, in each direction; compare.json has all
FEW = 4  # degrees of freedom below which the noise over seeds is hardly known: Student's t is 3.2 to 12.7
HOW = """\
A difference is the mean, over the items that both sides answered, of the difference between their scores. It is shown \
if it is significant after adjustment for the number of differences (Holm) and, where several seeds were run, larger \
than the noise over seeds. Detectable: the difference that would have been detected in 80 % of cases."""
INTERVALS = "Coloured: a difference is shown. Ticks: single runs. Grey band: what seeds alone may cause."


def show(comparison: Comparison, console: Console, judged: Sequence[Judged] = ()) -> None:
    """Print both tables of every suite, the verdicts, the notes, and a judge's preferences."""
    percent = _percent(comparison)
    for suite in comparison.suites:
        console.print(f"{suite.key}: {suite.metric}", style="bold")
        console.print(values_table(suite, percent))
        console.print(differences_table(suite, percent))
        for one in suite.differences:
            console.print(verdict(one))
        for line in notes(suite):
            console.print(f"note: {line}")
        console.print()
    for key, why in comparison.left_out.items():
        console.print(f"note: {key} is not compared for all sides: {why}")
    if judged:
        console.print(judged_table(judged, percent))
        for line in sentences(judged):
            console.print(line)


def _percent(comparison: Comparison) -> str:
    return f"{100 * comparison.options.confidence:g} %"


def values_table(suite: Suite, percent: str) -> Table:
    seeds = ["runs", "over runs"] if suite.noise else []
    shown = numbers_table("", "mean", f"{percent} interval", "items", "answers", *seeds)
    for name, value in suite.values.items():
        estimate = value.estimate
        cells = ["-", "-", "0", "0"]
        if estimate:
            cells = [f"{estimate.value:.3f}", interval(estimate.low, estimate.high)]
            cells += [f"{estimate.prompts:,}", f"{estimate.answers:,}"]
        spread = f"{min(value.by_run):.3f} to {max(value.by_run):.3f}" if len(value.by_run) > 1 else ""
        shown.add_row(name, *cells, *([str(len(value.by_run)), spread] if seeds else []))
    return shown


def differences_table(suite: Suite, percent: str) -> Table:
    """A table of the differences: each side against the first, or every two sides."""
    firsts, adjusted = {difference.a for difference in suite.differences}, len(suite.differences) > 1
    about = f"against {next(iter(firsts))}" if len(firsts) == 1 else "difference"
    shown = numbers_table(about, "mean", f"{percent} interval", "won/lost/tied", "p", "detectable")
    for difference in suite.differences:
        paired, p = difference.paired, difference.p_adjusted if adjusted else difference.p
        shown.add_row(
            difference.b if len(firsts) == 1 else f"{difference.b}\n- {difference.a}",
            f"{paired.value:+.3f}",
            interval(paired.low, paired.high, "+"),
            f"{paired.wins:,}/{paired.losses:,}/{paired.ties:,}",
            p_text(p)[2:].removeprefix("= "),
            "-" if paired.smallest is None else f"{paired.smallest:.3f}",
        )
    return shown


def notes(suite: Suite) -> Iterator[str]:
    """How the differences were tested, the noise over seeds, and the warnings."""
    tests = " and ".join(dict.fromkeys(one.test for one in suite.differences))
    several = ", p adjusted for their number (Holm)" if len(suite.differences) > 1 else ""
    yield f"test: {tests}{several}"
    if suite.noise:
        noise = suite.noise
        few = "; more seeds would narrow what seeds alone may cause" if noise.freedom < FEW else ""
        degrees = counted(noise.freedom, "degree")
        yield f"seeds: standard deviation {noise.deviation:.4f} over {noise.runs} runs ({degrees} of freedom){few}"
    else:
        yield "seeds: one run each, so the noise over seeds is not known"
    yield from suite.warnings


def as_json(comparison: Comparison, judged: Sequence[Judged] = ()) -> dict[str, Any]:
    """The whole comparison, with both answers to every item that flipped."""
    return {
        "format": FORMAT,
        "posttrain": __version__,
        "created": now(),
        "confidence": comparison.options.confidence,
        "sides": [
            {
                "name": side.name,
                "paths": [one.path for one in side.sources],
                "seeds": [one.seed for one in side.sources],
            }
            for side in comparison.sides
        ],
        "suites": {suite.key: _suite(suite) for suite in comparison.suites},
        "not_compared": dict(comparison.left_out),
        "judged": [judged_facts(one) for one in judged],
    }


def _suite(suite: Suite) -> dict[str, Any]:
    values = {
        name: {**(asdict(one.estimate) if one.estimate else {}), "ungraded": one.ungraded, "runs": list(one.by_run)}
        for name, one in suite.values.items()
    }
    return {
        "metric": suite.metric,
        "values": values,
        "differences": list(map(as_facts, suite.differences)),
        "seeds": suite.noise and asdict(suite.noise),
        "warnings": list(suite.warnings),
    }


def as_facts(difference: Difference, flips: bool = True) -> dict[str, Any]:
    """A difference for JSON, with or without the items that flipped."""
    return {
        "items": len(difference.items.items),
        "not_compared": dict(difference.items.left_out),
        "other_prompts": len(difference.items.other_prompts),
        **asdict(difference.paired),
        **{name: getattr(difference, name) for name in ("a", "b", "test", "p", "mid_p", "p_adjusted", "better")},
        "seed_floor": difference.floor,
        "verdict": verdict(difference),
        **({"flips": [_flip(flip) for flip in difference.flips]} if flips else {}),
    }


def _flip(flip: Flip) -> dict[str, Any]:
    facts: dict[str, Any] = {"item": flip.a.item, "prompt": flip.a.prompt, "gold": flip.a.gold}
    for name, score, answer in (("a", flip.a_score, flip.a), ("b", flip.b_score, flip.b)):
        texts = {"extracted": answer.extracted, "verdict": answer.verdict, "completion": answer.completion}
        facts[name] = {"score": score, **texts}
    if flip.b.prompt != flip.a.prompt:
        facts["b"]["prompt"] = flip.b.prompt
    return facts


def write(comparison: Comparison, folder: Path, judged: Sequence[Judged] = ()) -> None:
    """Write `compare.json`, `compare.svg` and `compare.html` to the folder. Raises RunError if that fails."""
    make_folder(folder)
    save_json(folder / "compare.json", as_json(comparison, judged))
    picture = folder / "compare.svg"
    if comparison.suites:
        write_drawings(picture, [figure for suite in comparison.suites for figure in intervals_of(suite)])
    else:  # left by an earlier comparison
        picture.unlink(missing_ok=True)
    title = "Comparison of " + ", ".join(side.name for side in comparison.sides)
    page = [*sections(comparison), *judged_sections(judged, _percent(comparison))]
    pages.write_page(folder / "compare.html", title, page)


def sections(comparison: Comparison) -> Iterator[pages.Section]:
    percent = _percent(comparison)
    verdicts = [f"{suite.key}: {verdict(one)}" for suite in comparison.suites for one in suite.differences]
    if verdicts:
        yield pages.Text("In short", "\n".join(verdicts))
        figures = (figure for suite in comparison.suites for figure in intervals_of(suite))
        yield pages.charts("Means and differences", figures, INTERVALS)
    for suite in comparison.suites:
        yield pages.Table(f"{suite.key}: means", *cells_of(values_table(suite, percent)), suite.metric)
        yield pages.Table(f"{suite.key}: differences", *cells_of(differences_table(suite, percent)), HOW)
        yield pages.Text(f"{suite.key}: notes", "\n".join(notes(suite)))
        for one in suite.differences:
            yield from _flipped(suite, one)
    paths = {side.name: ", ".join(source.path for source in side.sources) for side in comparison.sides}
    yield pages.Facts("Compared", {name: path for name, path in paths.items() if path})


def intervals_of(suite: Suite) -> Iterator[Drawing]:
    """The means and the differences of a suite, with their intervals."""
    means = [
        Interval(name, value.estimate.value, value.estimate.low, value.estimate.high, at % COLOURS, dots=value.by_run)
        for at, (name, value) in enumerate(suite.values.items())
        if value.estimate
    ]
    differences = [
        Interval(
            f"{one.b} − {one.a}", one.paired.value, one.paired.low, one.paired.high, 1 if one.shown else None, one.floor
        )
        for one in suite.differences
    ]
    yield intervals(f"{suite.key}: {suite.metric}", means)
    yield intervals(f"{suite.key}: difference", differences, zero=True)


def _flipped(suite: Suite, difference: Difference) -> Iterator[pages.Table]:
    """The items that one side answered better than the other, in each direction, with both answers."""
    for better, worse, wins in ((difference.b, difference.a, True), (difference.a, difference.b, False)):
        flips = [flip for flip in difference.flips if (flip.b_score > flip.a_score) == wins]
        more = f"; the first {FLIPS_SHOWN}, compare.json has all" if len(flips) > FLIPS_SHOWN else ""
        some = flips[:FLIPS_SHOWN]
        golds = {"gold": "right answer"} if any(flip.a.gold is not None for flip in some) else {}
        columns = {"item": "item", "prompt": "prompt"} | golds
        header = [*columns.values(), difference.a, difference.b]
        rows = [
            [*(getattr(flip.a, name) for name in columns), _scored(flip.a, flip.a_score), _scored(flip.b, flip.b_score)]
            for flip in some
        ]
        yield pages.Table(f"{suite.key}: {better} above {worse}", header, rows, f"{counted(len(flips), 'item')}{more}.")


def _scored(answer: Answer, score: float) -> str:
    extracted = "" if answer.extracted is None else f", {answer.extracted}"
    return f"[{score:.3g}{extracted}]\n{answer.completion}"
