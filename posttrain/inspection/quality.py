"""Data quality before a run: duplicates, overlap, contamination, length bias, label noise (docs/data.md)."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from posttrain.base.console import PlainConsole
from posttrain.base.errors import DataError, UsageError
from posttrain.base.terminal import say
from posttrain.base.words import by_key, counted
from posttrain.config import RunConfig, Stage, held_out_together
from posttrain.config.options import ExploreOptions
from posttrain.data import Prepared, Selection, explore, overview
from posttrain.data.prepare import prepare_run, rows_of_run
from posttrain.data.reading import parts_of
from posttrain.data.report import MalformedError
from posttrain.data.sources import layout_of
from posttrain.inspection import overlap
from posttrain.inspection.preferences import CONFIDENT, LabelNoise, LengthBias, label_noise, length_bias, margins_of
from posttrain.inspection.texts import MOST_WORDS, Corpus, read_corpus
from posttrain.planning.plan import StageTokenizers
from posttrain.runs.files import ready_to_write, save_json, save_rows
from posttrain.training.job import data_of

SHOWN = 3  # examples shown on a line
LISTED = 10  # rows shown of a list
WIDEST = 34  # width of `validation: prompt in train, exact`


def explore_stages(stages: Sequence[Stage], options: ExploreOptions) -> dict[str, Any]:
    """Show each stage's data in the terminal, unless `options.json`, and check it; returns what --json prints: for one
    stage its counts, lengths, rows and findings, for several these by stage."""
    for file in filter(None, (options.report, options.good_rows)):
        sources = [Path(each.config.data.source) for each in stages if isinstance(each.config.data.source, str)]
        ready_to_write(file, sources, options.overwrite)
    if options.good_rows and (len(stages) > 1 or not isinstance(stages[0].config.data.source, str)):
        raise UsageError("--good-rows writes the rows of one stage's one source: add data.source=SOURCE")
    console, tokenizers = PlainConsole(), StageTokenizers(0)
    overviews = dict[str, Any]()
    for stage in held_out_together(stages):
        if stage.name and not options.json:
            console.rule(f"stage {stage.name}", align="left")
        overviews[stage.name] = _explored(stage.config, tokenizers.of(stage), options, console)
    findings = {name: overview.get("findings") for name, overview in overviews.items()}
    if options.report is not None:
        save_json(options.report, findings if len(findings) > 1 else next(iter(findings.values())))
    return overviews if len(overviews) > 1 else next(iter(overviews.values()))


def _explored(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, options: ExploreOptions, console: Console
) -> dict[str, Any]:
    selection = Selection(options.rows, options.first, options.set, options.sort, options.row)
    try:
        prepared = data_of(config, config.models[0], tokenizer)
    except MalformedError:  # no run trains on these rows, so the model's positions do not matter
        prepared = prepare_run(config, tokenizer, refuse_malformed=False)
    if options.good_rows:
        _save_good(config, prepared, options.good_rows)
    if not options.json:
        explore(prepared, tokenizer, selection, console)
    shown = overview(prepared, tokenizer, selection)
    if options.no_quality:
        return shown
    quality = check_quality(config, prepared, tokenizer, options)
    if not options.json:
        console.print()
        quality.show(console)
    return shown | {"findings": quality.as_json()}


def _save_good(config: RunConfig, prepared: Prepared, file: Path) -> None:
    """Write the training rows that are not malformed as they were read, and say which settings read them."""
    [part], bad = parts_of(config.data), {row.row for row in prepared.report.malformed}
    source, end = part.open(part.max_rows, config.seed, lambda working, answer: working)
    records = itertools.islice(source.read(), part.skip_rows, end)
    save_rows(file, [record.value for record in records if record.value is not None and record.row not in bad])
    settings = f"data.source={file}" + (" data.skip_rows=0" if part.skip_rows else "")
    if known := layout_of(part.source):
        settings += f" data.format={known.format} 'data.columns={json.dumps(known.columns)}'"
    say(f"wrote {file} without {counted(len(bad), 'malformed row')}; use it with {settings}", error=True)


def check_quality(
    config: RunConfig, prepared: Prepared, tokenizer: PreTrainedTokenizerBase, options: ExploreOptions
) -> "Quality":
    """Check the training and validation rows, and return all findings. Raises a PosttrainError if a suite or file of
    `options.against` cannot be read, or if the reward model cannot score the pairs."""
    reward_model, n = options.reward_model, options.ngram
    questions, missing = overlap.questions_of(options.against)  # first, so that an error comes before long work
    noise, contradicted = None, []
    if reward_model is not None:
        rows, margins = margins_of(config, reward_model)
        try:
            noise = label_noise(margins)
        except ValueError as error:
            raise DataError(f"--reward-model {reward_model}: {error}") from error
        for i in noise.contradicted.tolist():
            contradicted.append({"row": int(rows[i]), "margin": float(margins[i]), "wrong": float(noise.wrong_P[i])})
    corpus = read_corpus(rows_of_run(config, tokenizer), prepared)
    shared = [overlap.contamination(suite, corpus, n) for suite in questions]
    repeated = list(overlap.duplicates(corpus))
    return Quality(corpus, repeated, shared, missing, n, bias_of(prepared, corpus), noise, contradicted)


def bias_of(prepared: Prepared, corpus: Corpus) -> LengthBias | None:
    """The length bias of the training pairs in tokens, without ties; None if there are no such pairs."""
    train = prepared.train
    if prepared.kind != "pair" or train.ties.all():
        return None
    inside = corpus.sets == 0
    prompts = dict(zip(corpus.numbers[inside].tolist(), corpus.prompt_keys[inside].tolist(), strict=True))
    _, once = np.unique(train.rows, return_index=True)
    once = once[~train.ties[once]]
    keys = [prompts.get(row, -1 - row) for row in train.rows[once].tolist()]
    return length_bias(train.view[once, 3], train.view[once, 4], keys)


@dataclass(frozen=True, slots=True)
class Quality:
    """All findings. `missing`: the suites that were not checked, with reasons."""

    corpus: Corpus
    duplicates: Sequence[overlap.Duplicates]
    contamination: Sequence[overlap.Contamination]
    missing: Mapping[str, str]
    n: int
    bias: LengthBias | None
    noise: LabelNoise | None
    contradicted: Sequence[dict[str, Any]]  # by `noise`: row, margin and the probability that the label is wrong

    @property
    def _rows(self) -> dict[str, int]:
        """The number of rows of each set."""
        return {name: int((self.corpus.sets == i).sum()) for i, name in enumerate(self.corpus.names)}

    def as_json(self) -> dict[str, Any]:
        """All findings, with all rows."""
        noise = None
        if self.noise is not None:
            noise = {name: getattr(self.noise, name) for name in ("pairs", "rate", "temperature", "disagree")}
            noise |= {"interval": [self.noise.low, self.noise.high], "contradicted": self.contradicted}
        return {
            "rows": self._rows,
            "words": len(self.corpus.rows.words),
            "only_first_rows_of": self.corpus.cut,
            "near": {"jaccard": overlap.NEAR, "words": overlap.SHINGLE},
            "duplicates": {line.what: {"of": line.among, "rows": line.rows} for line in self.duplicates},
            "contamination": {
                suite.name: {name: getattr(suite, name) for name in ("checked", "short", "unread", "copies", "hits")}
                for suite in self.contamination
            },
            "ngram": self.n,
            "suites_not_checked": dict(self.missing),
            "notes": list(self.notes()),
            "length_bias": self.bias and asdict(self.bias),
            "label_noise": noise,
        }

    def show(self, console: Console) -> None:
        """Print the findings in tables of at most 80 columns."""
        counts = ", ".join(f"{name} {count:,}" for name, count in self._rows.items())
        console.print(f"data quality: {counts} rows, {len(self.corpus.rows.words):,} words", soft_wrap=False)
        for name in self.corpus.cut:
            console.print(f"only the first {MOST_WORDS:,} words of {name} are checked", soft_wrap=False)
        table = _table("duplicates", "rows", "share", "examples")
        for line in self.duplicates:
            share = len(line.rows) / line.among if line.among else 0.0
            table.add_row(line.what, f"{len(line.rows):,}", f"{share:.1%}", _examples(line.rows))
        console.print(table)
        if self.contamination:
            table = _table("questions in train", "checked", "shared", "copies", "examples")
            for suite in self.contamination:
                copies = [f"{question} in {row}" for question, share, row in suite.hits if share >= overlap.COVERED]
                cells = f"{suite.checked:,}", f"{len(suite.hits):,}", f"{suite.copies:,}", "; ".join(copies[:SHOWN])
                table.add_row(suite.name, *cells)
            console.print(table)
        for note in self.notes():
            console.print(note, soft_wrap=False)
        if self.contradicted:
            table = _table("label contradicted", "margin", "turned")
            for pair in self.contradicted[:LISTED]:
                table.add_row(f"row {pair['row']}", f"{pair['margin']:.3g}", f"{pair['wrong']:.0%}")
            console.print(table)
        if (more := len(self.contradicted) - LISTED) > 0:
            console.print(f"and {counted(more, 'more row')}: --report FILE.json has all", soft_wrap=False)

    def notes(self) -> Iterator[str]:
        """The findings that are printed as sentences."""
        if self.contamination:
            copied = f"{overlap.COVERED:.0%} of the question's words are"
            yield f"shared: a {self.n}-gram of words is in a training row; copies: {copied}"
        if short := ", ".join(f"{suite.short:,} of {suite.name}" for suite in self.contamination if suite.short):
            yield f"questions of fewer than 8 words, not checked: {short}"
        for suite in self.contamination:
            if suite.unread:
                yield f"unreadable questions, not checked: {suite.unread:,} of {suite.name}"
        if self.missing:
            yield f"suites not checked, because their data is not in the local cache: {', '.join(self.missing)}"
        if self.bias is not None:
            yield _bias_line(self.bias)
        if self.noise is not None:
            yield f"label noise: {self.noise}"
            sure, many = len(self.contradicted), self.noise.disagree
            yield (
                f"the reward model prefers the rejected reply in {many / self.noise.pairs:.1%} of the pairs, and with "
                f"a calibrated probability of {CONFIDENT:.0%} or more in {sure:,} ({sure / self.noise.pairs:.1%})"
            )


def _bias_line(bias: LengthBias) -> str:
    longer = bias.longer
    if longer is None:
        return f"length bias: unknown, because all {bias.pairs:,} pairs have replies of equal length"
    bounds, says = "", "so length alone does not predict the preference"
    if longer.low is not None and longer.high is not None:
        bounds = f" (95 % interval {longer.low:.1%} to {longer.high:.1%})"
        if not longer.low <= 0.5 <= longer.high:
            says = f"so {'longer' if longer.value > 0.5 else 'shorter'} replies tend to be preferred"
    equal = f", {bias.equal:,} of equal length not counted" if bias.equal else ""
    return (
        f"length bias: the longer reply is chosen in {longer.value:.1%} of {longer.answers:,} pairs{bounds}{equal}, "
        f"{says}; AUC {bias.auc:.3f}, mean tokens of chosen {bias.chosen_mean:.0f}, "
        f"of rejected {bias.rejected_mean:.0f}"
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold", min_width=WIDEST if first == "duplicates" else None)
    for name in others:
        if name == "examples":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _examples(rows: Iterable[tuple[str, str]]) -> str:
    """The first duplicates, grouped by the row that they repeat."""
    groups = by_key((earlier, row) for row, earlier in rows)
    return "; ".join(
        f"{earlier} = {', '.join(again[:SHOWN])}{' …' if len(again) > SHOWN else ''}"
        for earlier, again in list(groups.items())[:SHOWN]
    )
