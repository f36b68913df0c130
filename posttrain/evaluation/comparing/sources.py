"""The sources of a comparison, read as answers: evaluation folders, runs, and files with scored, graded or generated
rows. Sources are grouped into sides: a side is one source, or several runs that differ only in their seed."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

from posttrain.base.errors import DataError, RunError
from posttrain.base.words import by_key, counted, model_name
from posttrain.evaluation.records import Answer, is_evaluation, read_answers, read_summary
from posttrain.runs.finding import runs_below
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary

AT_STEP = re.compile(r"(?P<folder>.+)@(?P<step>\d+)")
OWN = ("name", "output_dir", "seed")  # settings that may differ between runs of one method
PROMPTS, GOLDS = ("prompt", "problem", "question", "instruction"), ("answer", "gold")  # columns
REWARD = "reward on "  # before the name of a run's validation set


@dataclass(frozen=True, slots=True)
class Scores:
    """A suite's answers, the name of their score, and the settings that produced them (sampling …)."""

    metric: str
    answers: Sequence[Answer]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """One path. `settings`: a run's settings without the seed, as a string; None if the path is not of a run."""

    name: str
    path: str
    suites: Mapping[str, Scores]
    settings: str | None = None
    seed: int | None = None


def read_source(path: str) -> Source:
    """Read an evaluation folder, a run (RUN, or RUN@STEP for the validation completions of a step), or a file.

    Raises RunError or DataError if it is missing, unfinished or damaged, or has nothing that can be compared."""
    found = None if Path(path).expanduser().exists() else AT_STEP.fullmatch(path)
    folder, step = Path(found["folder"] if found else path).expanduser(), int(found["step"]) if found else None
    if folder.is_file():
        return Source(folder.name.partition(".")[0], path, read_rows(folder))
    if not folder.is_dir():
        raise RunError(f"there is no file or folder {folder}; a model of the hub needs suites to compare on (--suite)")
    if is_evaluation(folder):
        if step is not None:
            raise RunError(f"{folder} is an evaluation: @{step} names a step of a run")
        model = str(read_summary(folder)["model"].get("path") or "")
        runs = [_above(folder), *([Path(model).absolute().parent] if model else [])]  # of the folder, or of the model
        run = next((run for run in runs if (run / "run.json").is_file()), None)
        settings, seed = _settings(run) if run else (None, None)
        return Source(_name(folder), path, _evaluation(folder), settings and f"{settings} {folder.name}", seed)
    evaluated = _evaluated(folder) if step is None else None
    suites: dict[str, Scores] = {} if evaluated is None else _evaluation(evaluated)
    if (folder / "run.json").is_file() and (folder / "rollouts.sqlite").is_file():
        suites |= _validation(folder, step)
    if not suites:
        below = [] if (folder / "rollouts.sqlite").is_file() else runs_below(folder)
        if len(below) > 1 or below not in ([], [folder]):
            raise RunError(f"{folder} contains {counted(len(below), 'run')}: name one, such as {below[-1]}")
        raise RunError(
            f"{folder} has nothing to compare: no evaluation (posttrain eval, or --suite, makes one), and no rewarded "
            "completions of validation prompts (rewards, data.validation and rollout.save in the settings of a run)"
        )
    settings, seed = _settings(folder)
    name = model_name(str(folder)) if evaluated is None else _name(evaluated)
    if settings and evaluated is not None and evaluated.name != "final":
        settings = f"{settings} {evaluated.name}"
    return Source(name + (f"@{step}" if step is not None else ""), path, suites, settings, seed)


def _evaluated(folder: Path) -> Path | None:
    """The evaluation folder of a run's final model, or else of the only model of the run that was evaluated.

    Raises RunError if several models were evaluated, but not the final one."""
    found = sorted(path for path in (folder / "evaluation").glob("*") if path.is_dir() and is_evaluation(path))
    final = next((path for path in found if path.name == "final"), None)
    if final is None and len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise RunError(
            f"{folder} has evaluations of {names}, but not of its final model: name one, such as {found[-1]}"
        )
    return final or next(iter(found), None)


def _above(folder: Path) -> Path:
    """RUN for RUN/evaluation/MODEL."""
    return folder.absolute().parent.parent


def _name(folder: Path) -> str:
    """The run's name if the evaluation is in a run folder, otherwise the name of the evaluated model."""
    if (_above(folder) / "run.json").is_file():
        return _above(folder).name + ("" if folder.name == "final" else f"/{folder.name}")
    return str(read_summary(folder)["model"].get("name") or folder.absolute().name).removesuffix("/final")


def _settings(run: Path) -> tuple[str | None, int | None]:
    """The settings of a run except those in OWN, as a string, and its seed; None if they cannot be read."""
    config = RunSummary(run).config
    if not config:
        return None, None
    rest = {name: value for name, value in config.items() if name not in OWN}
    return json.dumps(rest, sort_keys=True, default=str), config.get("seed", 0)


def _evaluation(folder: Path) -> dict[str, Scores]:
    """The suites of an evaluation folder. Raises RunError unless all their answers are present, each exactly once."""
    summary, suites = read_summary(folder), {}
    answers_of = by_key((f"{answer.suite} {answer.setting}".strip(), answer) for answer in read_answers(folder))
    for key, facts in summary["suites"].items():
        answers = answers_of.get(key, [])
        if len(answers) != facts.get("answers", len(answers)) or not answers:
            raise RunError(
                f"{folder} is incomplete: answers.jsonl has {counted(len(answers), 'answer')} of {key}, but "
                f"summary.json counts {facts.get('answers', 0):,}: run the same `posttrain eval` again"
            )
        twice, times = Counter((one.item, one.sample) for one in answers).most_common(1)[0]
        if times > 1:
            raise RunError(f"{folder / 'answers.jsonl'} has item {twice[0]}, sample {twice[1]} of {key} twice")
        about = {name: facts[name] for name in ("source", "sampling", "rule") if name in facts}
        suites[key] = Scores(str(facts.get("metric", "score")), answers, about)
    if not suites:
        raise RunError(f"{folder} has no suite: run `posttrain eval` again")
    return suites


def _validation(run: Path, step: int | None) -> dict[str, Scores]:
    """The rewards of a run's validation completions at `step` (None: the last), as a suite per validation set."""
    with StoredRun(run, looking=True) as stored:
        every = stored.evaluations()
    by_step = read_validation(every)
    if step is not None and step not in by_step:
        has = f"it has {', '.join(map(str, sorted(by_step)))}" if by_step else "it has none"
        raise RunError(f"{run} has no evaluation at step {step}: {has}")
    if not by_step:
        return {}
    at = max(by_step) if step is None else step
    rewards = []
    for term in RunSummary(run).config.get("rewards") or []:
        if isinstance(term, dict):
            facts = [f"{key} {one}" for key, one in term.items() if one is not None and key not in ("type", "name")]
            rewards.append(f"{term.get('type')} ({', '.join(facts)})")
    about = {"step": at, "rewards": ", ".join(rewards) or "none"}
    return {
        REWARD + name: Scores("reward", answers, about)
        for name, answers in by_key((answer.suite, answer) for answer in by_step[at]).items()
        if any(answer.score is not None for answer in answers)
    }


def read_validation(evaluations: Sequence[Mapping[str, Any]]) -> dict[int, list[Answer]]:
    """The validation completions of a run as answers, by step; an item is a row of a data set."""
    by_step: dict[int, list[Answer]] = {}
    samples: Counter[tuple[int, str]] = Counter()
    for row in evaluations:
        item = f"{row['dataset']}/{row['row']}"
        answer = Answer(
            suite=row["dataset"],
            item=item,
            sample=samples[row["step"], item],
            verdict="ungraded" if row["reward"] is None else "scored",
            score=row["reward"],
            **{name: row[name] for name in ("prompt", "completion", "finish_reason")},
        )
        by_step.setdefault(row["step"], []).append(answer)
        samples[row["step"], item] += 1
    return by_step


def read_rows(file: Path) -> dict[str, Scores]:
    """Read the rows of a file as a suite: `pairs` of `posttrain score`, `rows` of `posttrain grade`, or `completions`
    of `posttrain generate`, which have no score and are for a judge.

    Rows that cannot be read or have no score are not graded. Raises DataError if no row is of one of these kinds.
    """
    from posttrain.data.readers import read_files  # imports torch

    rows = [(str(record.row), record.value or {}) for record in read_files((file,))]
    for key, metric, fields, read in (
        ("pairs", "pairwise accuracy", {"chosen_reward", "chosen_logprob"}, _pair),
        ("rows", "score", {"score", "verdict"}, _graded),
        ("completions", "", {"completions"}, _generated),
    ):
        if any(fields & row.keys() for _, row in rows):
            found = [(item, sample, facts) for item, row in rows for sample, facts in enumerate(read(row))]
            return {key: Scores(metric, [Answer(suite=key, item=item, sample=n, **facts) for item, n, facts in found])}
    raise DataError(
        f"{file} has nothing to compare: no row has chosen_reward and rejected_reward (posttrain score), a score "
        "(posttrain grade) or completions (posttrain generate)"
    )


def _pair(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A scored pair, right if chosen scores above rejected. Its prompt is the pair, which both models share."""
    from posttrain.evaluation.items import pair_text  # imports torch

    facts = {"prompt": pair_text(row) if {"chosen", "rejected"} & row.keys() else "", "completion": ""}
    for key in ("reward", "logprob"):
        chosen, rejected = _number(row.get(f"chosen_{key}")), _number(row.get(f"rejected_{key}"))
        if chosen is not None and rejected is not None:
            verdict, margin = "correct" if chosen > rejected else "wrong", f"{chosen - rejected:+.4g}"
            return [facts | {"verdict": verdict, "score": float(chosen > rejected), "extracted": margin}]
    return [facts | {"verdict": "ungraded"}]


def _graded(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    score, extracted = _number(row.get("score")), row.get("extracted")
    verdict = str(row.get("verdict") or ("ungraded" if score is None else "scored"))
    facts = {"score": score, "verdict": verdict, "extracted": None if extracted is None else _text(extracted)}
    facts |= {"completion": _text(row.get("completion", "")), "finish_reason": "stop" if "completion" in row else ""}
    return [_asked(row) | facts]


def _generated(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    facts = _asked(row) | {"verdict": "ungraded"}
    done = [one if isinstance(one, dict) else {"text": one} for one in row.get("completions") or []]
    return [
        facts | {"completion": _text(one.get("text", "")), "finish_reason": str(one.get("finish_reason") or "stop")}
        for one in done
    ] or [facts | {"completion": "", "finish_reason": ""}]


def _asked(row: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt and the right answer of a row, from the first of their columns that it has."""
    prompt, gold = ([_text(row[name]) for name in names if row.get(name) is not None] for names in (PROMPTS, GOLDS))
    return {"prompt": prompt[0] if prompt else "", "gold": gold[0] if gold else None}


def _number(value: Any) -> float | None:
    number = float(value) if isinstance(value, int | float) else None
    return number if number is not None and math.isfinite(number) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: its sources, and the suites that all of them have."""

    name: str
    sources: Sequence[Source]

    def suites(self) -> list[str]:
        return [key for key in self.sources[0].suites if all(key in source.suites for source in self.sources)]

    def metric(self, key: str) -> str:
        return self.sources[0].suites[key].metric

    def is_scored(self, key: str) -> bool:
        return any(one.score is not None for source in self.sources for one in source.suites[key].answers)

    def by_item(self, key: str) -> dict[str, list[Answer]]:
        """The answers of all runs by item."""
        return by_key((answer.item, answer) for scores in self.runs(key) for answer in scores.answers)

    def runs(self, key: str) -> list[Scores]:
        return [source.suites[key] for source in self.sources]


def split_name(argument: str) -> tuple[str | None, str]:
    """Split NAME=PATH into (NAME, PATH). A path alone, even one with an equals sign, gives (None, path)."""
    name, equals, path = argument.partition("=")
    if not equals or not name or not path or "/" in name or Path(argument).expanduser().exists():
        return None, argument
    return name, path


def make_sides(named: Sequence[tuple[str | None, Source]]) -> list[Side]:
    """Group sources into sides, in order: sources with the same name, or unnamed runs that differ only in the seed.

    If this would give a single side, every source is a side, so that two seeds of one method can be compared, too.
    Raises RunError if fewer than two sides are left.
    """
    seeds = by_key((source.settings, source.seed) for name, source in named if name is None)
    # A seed that occurs twice: checkpoints or steps of one run.
    alike = {settings for settings, each in seeds.items() if None not in each and len({*each}) == len(each)} - {None}
    keys: list[tuple[str, object]] = []
    for number, (name, source) in enumerate(named):
        own = ("settings", source.settings) if source.settings in alike else ("source", number)
        keys.append(own if name is None else ("name", name))
    if len({*keys}) == 1 and named[0][0] is None:
        keys = [("source", number) for number in range(len(named))]
    groups = by_key(zip(keys, (source for _, source in named), strict=True))
    if len(groups) < 2:
        raise RunError(f"there is only one side, {named[0][0]}: name at least two, such as a=RUN b=RUN")
    return _distinct([Side(_side_name(key, sources), tuple(sources)) for key, sources in groups.items()])


def _side_name(key: tuple[str, object], sources: Sequence[Source]) -> str:
    if key[0] == "name":
        return str(key[1])
    if len(sources) == 1:
        return sources[0].name
    common = commonprefix([source.name for source in sources]).rstrip("-_./ ")  # noqa: RUF071 (by characters)
    return f"{common or sources[0].name} ({counted(len(sources), 'seed')})"


def _distinct(sides: Sequence[Side]) -> list[Side]:
    """Make the names of the sides distinct: sides with the same name are named by their paths, or numbered."""
    distinct = []
    for number, side in enumerate(sides):
        same = [other for other in sides if other.name == side.name]
        paths = {str(other.sources[0].path) for other in same}
        rank = 1 + sum(other.name == side.name for other in sides[:number])
        name = str(side.sources[0].path) if len(paths) == len(same) else f"{side.name} #{rank}"
        distinct.append(side if len(same) == 1 else replace(side, name=name))
    return distinct


def settings_that_differ(sides: Sequence[Side], key: str) -> Mapping[str, Sequence[object]]:
    """Settings of a suite's answers, except seeds, that are not the same for all sides: values by name."""
    settings: list[dict[str, object]] = []
    for side in sides:
        facts: dict[str, object] = {}
        for name, value in side.runs(key)[0].about.items():
            facts |= {str(inner): one for inner, one in value.items()} if isinstance(value, Mapping) else {name: value}
        settings.append(facts)
    names = dict.fromkeys(name for facts in settings for name in facts if name != "seed")
    values = {name: [facts.get(name) for facts in settings] for name in names}
    return {name: several for name, several in values.items() if any(value != several[0] for value in several)}
