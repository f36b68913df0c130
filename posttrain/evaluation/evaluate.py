"""`posttrain eval`: suites of questions answered by a model, or by recorded completions, graded and stored."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain import __version__
from posttrain.base.errors import DataError, ModelError
from posttrain.base.threads import sharing_cores
from posttrain.base.words import counted
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.options import EvalOptions
from posttrain.config.schema.suite import CALIBRATED, SuiteConfig
from posttrain.data.prompts import Prompt
from posttrain.data.readers import read_files
from posttrain.data.report import Malformed
from posttrain.data.sources import Files
from posttrain.engines import Engine, Sampling, make_engine
from posttrain.evaluation.answering import Answers, Chosen, Generated, Recorded, ask, stops_of
from posttrain.evaluation.calibration import calibrate
from posttrain.evaluation.items import Items
from posttrain.evaluation.pairs import evaluate_pairs, pair_facts, pairs_for
from posttrain.evaluation.records import EvaluationStore, write_files
from posttrain.evaluation.running import Judge, finished, run
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import is_reward_model, load_model, load_tokenizer
from posttrain.runs.files import save_json
from posttrain.runs.inputs import content_of
from posttrain.runs.provenance import now

log = logging.getLogger("posttrain")

Setting = Mapping[str, float]  # of a sweep: temperature and top_p, by name


def evaluate_recorded(file: Path, chosen: Sequence[Items], options: EvalOptions, folder: Path) -> dict[str, Any]:
    """Grade the completions of a file as answers to the suites. Returns the summary, which is also in the folder."""
    column = options.completion_column
    if other := next((items.suite for items in chosen if items.suite.kind != "generate"), None):
        raise DataError(f"{file}: recorded completions cannot answer the suite {other.name}, of the kind {other.kind}")
    content, records = f"sha256 {Files((file,)).digest}", list(read_files((file,)))
    about = {"name": file.stem, "path": str(file), "content": content}
    with EvaluationStore(folder, options.overwrite) as store:
        store.is_of(content)
        every = [Recorded(one.suite, one.items, records, column, options.num_generations) for one in chosen]
        for suite in [items.suite for items in chosen] if len(chosen) > 1 else []:
            with Judge(suite, options.workers, options.deadline):  # an error of the last one comes before the first
                pass
        for items, answers in zip(chosen, every, strict=True):
            suite, key = items.suite, items.suite.name
            if answers.unused:
                rows = f"{counted(answers.unused, 'row')} of {len(records):,}"
                log.warning("%s: %s unused: no completion, or of no item of %s that is asked", file, rows, key)
            facts = {"model": content, "column": column, "samples": answers.samples}
            facts |= {"items": items.digest, "rule": suite.rule}
            if not finished(store, key, facts):
                with Judge(suite, options.workers, options.deadline) as judge:
                    sampling = {"recorded": column}
                    run(items, answers, judge, answers.samples, store=store, key=key, facts=facts, sampling=sampling)
                _written(folder, store, about, {}, options)
        return _written(folder, store, about, {items.suite.name: items for items in chosen}, options)


@sharing_cores()
def evaluate(
    model: ModelConfig,
    name: str,
    chosen: Sequence[Items],
    options: EvalOptions,
    devices: DevicesConfig,
    folder: Path,
) -> dict[str, Any]:
    """Answer the suites with a model. Returns the summary, which is also in the folder with every answer.

    The model is loaded only if an evaluation is not finished. Suites of pairs also take a reward model. What every
    suite needs is checked before the first one starts, and each that ends is in the summary at once.

    Raises RunError, before any work, for an evaluation in the folder that differs in its model or settings.
    """
    content = content_of(model)
    asked = [one for items in chosen for one in _asked(items, model, content, options)]
    with EvaluationStore(folder, options.overwrite) as store, _Loaded(model, options, devices) as loads:
        store.is_of(content)
        about = {"name": name, "path": model.path, "content": content}
        left = [one for one in asked if not finished(store, one.key, one.facts)]
        loads.check({one.items.suite.name: one.items for one in left}.values())
        for one in left:
            if one.items.suite.kind == "preference":
                loaded, tokenizer = loads.scored()
                evaluate_pairs(model, loaded, tokenizer, one.items.suite, options, store, one.facts)
            else:
                loads.run(one, store)
            _written(folder, store, about, {}, options)
        return _written(folder, store, about, {one.key: one.items for one in asked}, options)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One suite with one setting, under `key` in the database; `facts` identify it."""

    items: Items
    sampling: Sampling
    setting: str
    facts: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{self.items.suite.name} {self.setting}".strip()


def _asked(items: Items, model: ModelConfig, content: str, options: EvalOptions) -> Iterator[_Asked]:
    suite, generates = items.suite, items.suite.kind == "generate"
    for setting in options.swept if generates else [{}]:
        sampling = _sampling(suite, options, setting)
        named = " ".join(f"{key}={value:g}" for key, value in setting.items()) if len(options.swept) > 1 else ""
        facts = {
            "model": content,
            "items": items.digest,
            "engine": options.engine if generates else "scorer",
            "sampling": _shown(sampling) if generates else {},
            "rule": suite.rule,
            "template": suite.template,
            "system prompt": suite.system_prompt,
            "dtype": model.dtype,
        }
        facts |= {"chat_template_kwargs": suite.chat_template_kwargs} if suite.chat_template_kwargs else {}
        if suite.kind == "preference":
            facts = pair_facts(model, suite, options, content)
        yield _Asked(items, sampling, named, facts)


class _Loaded(ExitStack):
    """The model, its engine and tokenizer, loaded at the first suite that is not finished."""

    def __init__(self, model: ModelConfig, options: EvalOptions, devices: DevicesConfig):
        super().__init__()
        self._model, self._options, self._device = model, options, take_device(devices)
        self._parts: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
        self._engine: Engine | None = None
        self._prompts: dict[str, dict[int, Prompt | Malformed]] = {}  # by suite: those of all settings

    def scored(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model, which may be a reward model, and its tokenizer."""
        if self._parts is None:
            kind = "reward" if is_reward_model(self._model) else "lm"
            tokenizer = load_tokenizer(self._model)
            loaded = load_model(self._model, kind, compute_dtype(self._model, self._device), self._device)
            self._parts = loaded, tokenizer
        return self._parts

    def check(self, chosen: Collection[Items]) -> None:
        """Raise what one of several suites would raise only after others: rules, templates, rows, the engine."""
        if len(chosen) < 2:
            return
        for suite in [items.suite for items in chosen if items.suite.kind != "preference"]:
            self._refuse_reward_model()
            with Judge(suite, self._options.workers, self._options.deadline):
                pass
        loaded, tokenizer = self.scored()
        for items in chosen:
            if items.suite.kind == "preference":
                pairs_for(self._model, loaded, tokenizer, items.suite, self._options)
            else:
                self._asked(items)
        if any(items.suite.kind == "generate" for items in chosen):
            self._started()

    def _refuse_reward_model(self) -> None:
        if is_reward_model(self._model):
            raise ModelError(
                f"{self._model.path} is a reward model, which scores completions and generates none: evaluate it "
                "on pairs (--suite hh, or a suite with `kind: preference`)"
            )

    def run(self, asked: _Asked, store: EvaluationStore) -> None:
        self._refuse_reward_model()
        suite = asked.items.suite
        generates = suite.kind == "generate"
        with Judge(suite, self._options.workers, self._options.deadline) as judge:
            run(
                asked.items,
                self._answers(asked.items, asked.sampling),
                judge,
                asked.sampling.num_generations if generates else 1,
                store=store,
                key=asked.key,
                setting=asked.setting,
                facts=asked.facts,
                sampling=_shown(asked.sampling) if generates else {},
            )

    def _answers(self, items: Items, sampling: Sampling) -> Answers:
        (policy, tokenizer), prompts = self.scored(), self._asked(items)
        if items.suite.kind == "choices":
            return Chosen(items.suite, policy, tokenizer, prompts, self._device)
        engine = self._started()
        stops = stops_of(items.suite, policy, tokenizer)
        if not stops and not sampling.stop:
            log.warning(
                "neither %s nor its tokenizer has a stop token, so every completion runs to %d tokens: set the "
                "tokenizer's eos_token, or give --stop",
                self._model.path,
                sampling.max_completion_length,
            )
        return Generated(engine, replace(sampling, stop_token_ids=stops), tokenizer, prompts)

    def _asked(self, items: Items) -> dict[int, Prompt | Malformed]:
        """The prompts of a suite."""
        policy, tokenizer = self.scored()
        if items.suite.name not in self._prompts:
            self._prompts[items.suite.name] = ask(items.suite, items.items, tokenizer, policy)
        return self._prompts[items.suite.name]

    def _started(self) -> Engine:
        """The engine, for the prompts so far."""
        if self._engine is None:
            policy, tokenizer = self.scored()
            every = [one for prompts in self._prompts.values() for one in prompts.values()]
            longest = max((len(one.tokens) for one in every if isinstance(one, Prompt)), default=1)
            made = make_engine(self._options.engine, policy, tokenizer, longest_prompt=longest)
            self._engine = self.enter_context(closing(made))
        return self._engine


def _sampling(suite: SuiteConfig, options: EvalOptions, setting: Setting) -> Sampling:
    return Sampling(
        temperature=setting.get("temperature", suite.temperature),
        top_p=setting.get("top_p", 1.0),
        top_k=options.top_k,
        min_p=options.min_p,
        max_completion_length=options.max_completion_length or suite.max_completion_length,
        num_generations=options.num_generations or suite.num_generations,
        stop=suite.stop,
        seed=options.seed,
    )


def _shown(sampling: Sampling) -> dict[str, Any]:
    shown = asdict(sampling) | {"stop": list(sampling.stop)}  # as JSON reads it back
    del shown["stop_token_ids"]  # the model's
    return shown


def _written(
    folder: Path, store: EvaluationStore, model: Mapping[str, Any], asked: Mapping[str, Items], options: EvalOptions
) -> dict[str, Any]:
    for key, items in asked.items() if options.calibrate else ():
        known = store.summaries()[key]  # `calibration` is added where the suite's rule compares answers
        if items.suite.rule in CALIBRATED and items.suite.kind == "generate" and "calibration" not in known:
            found = calibrate(items, list(store.answers(key)), options.workers, options.deadline)
            store.finish(key, known | {"calibration": found})
    about = {"posttrain": __version__, "created": now()}
    summary = write_files(folder, store, model, about)
    written: set[str] = set()
    for key, items in asked.items():
        name = items.suite.outputs
        if name and name not in written:  # of a sweep, the first setting
            written.add(name)
            save_json(folder / name, list(_outputs(key, items, store, str(model["name"]))))
    return summary


def _outputs(key: str, items: Items, store: EvaluationStore, generator: str) -> Iterator[dict[str, Any]]:
    """The first completion of every item, in AlpacaEval's format of model outputs."""
    fields = {item.id: item.fields for item in items.items}
    for answer in store.answers(key):
        if answer.sample == 0 and (answer.completion or answer.finish_reason):
            row = fields[answer.item]
            yield {
                "instruction": row.get("instruction", answer.prompt),
                "output": answer.completion,
                "generator": generator,
                "dataset": answer.group,
            }
