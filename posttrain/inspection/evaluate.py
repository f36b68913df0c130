"""`posttrain eval`: suites of questions answered by a model, or by recorded completions, graded and stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain import __version__
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.schema.rollout import EngineName, VllmConfig
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data.prompts import Prompt
from posttrain.data.readers import read_files
from posttrain.engines import Engine, Sampling, make_engine, stop_token_ids
from posttrain.errors import ModelError
from posttrain.evaluation.answering import Answers, Chosen, Generated, Recorded, ask
from posttrain.evaluation.calibration import CALIBRATED, calibrate
from posttrain.evaluation.items import Items
from posttrain.evaluation.judging import Judge
from posttrain.evaluation.records import EvaluationStore, write_files
from posttrain.evaluation.running import run
from posttrain.grading.pool import DEADLINE_S
from posttrain.inspection.pairs import PairOptions, evaluate_pairs
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import is_reward_model, load_model, load_tokenizer
from posttrain.scoring import Scorer
from posttrain.store.files import save_json
from posttrain.threads import sharing_cores
from posttrain.training.inputs import content_of

Setting = Mapping[str, float]  # of a sweep: temperature and top_p, by name


@dataclass(frozen=True, slots=True)
class Options:
    """What all suites of a call share. None: as each suite says."""

    engine: EngineName = "embedded"
    vllm: VllmConfig | None = None
    temperatures: tuple[float, ...] = ()
    top_ps: tuple[float, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    num_generations: int | None = None
    max_completion_length: int | None = None
    seed: int = 0
    deadline: float = DEADLINE_S
    workers: int | None = None
    calibrate: bool = False
    pairs: PairOptions = field(default_factory=PairOptions)

    def settings(self) -> list[dict[str, float]]:
        """Every combination of temperatures and top_p that is swept; one without names otherwise."""
        swept = {"temperature": self.temperatures, "top_p": self.top_ps}
        named = {name: values for name, values in swept.items() if values}
        return [dict(zip(named, values, strict=True)) for values in itertools.product(*named.values())]

    @property
    def sweeps(self) -> bool:
        return len(self.settings()) > 1


def evaluate_recorded(
    file: Path, column: str, chosen: Sequence[Items], options: Options, folder: Path, overwrite: bool = False
) -> dict[str, Any]:
    """Grade the completions of a file as answers to the suites. Returns the summary, which is also in the folder."""
    rows = [record.value for record in read_files((file,)) if record.value is not None]
    with EvaluationStore(folder, overwrite) as store:
        for items in chosen:
            one = Recorded(items.suite, rows, column, 1)
            samples = options.num_generations or max(1, one.most(items.items))
            answers = Recorded(items.suite, rows, column, samples)
            facts = {"model": str(file), "column": column, "items": items.digest, "rule": items.suite.rule}
            with Judge(items.suite, options.workers, options.deadline) as judge:
                key = items.suite.name
                run(items, answers, judge, samples, store=store, key=key, facts=facts, sampling={"recorded": column})
        return _written(folder, store, {"name": file.stem, "path": str(file), "content": None}, chosen, options)


@sharing_cores()
def evaluate(
    model: ModelConfig,
    name: str,
    chosen: Sequence[Items],
    options: Options,
    devices: DevicesConfig,
    folder: Path,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Answer the suites with a model. Returns the summary, which is also in the folder with every answer.

    The model is loaded only if an evaluation is not finished. Suites of pairs also take a reward model.
    """
    device = take_device(devices)
    content = content_of(model)
    loads = _Loaded(model, options, devices)
    with EvaluationStore(folder, overwrite) as store, loads:
        for items in chosen:
            if items.suite.kind == "preference":
                evaluate_pairs(model, items.suite, options.pairs, device, store, content)
                continue
            for setting in options.settings() if items.suite.kind == "generate" else [{}]:
                sampling = _sampling(items.suite, options, setting)
                named = " ".join(f"{key}={value:g}" for key, value in setting.items()) if options.sweeps else ""
                loads.run(items, sampling, named, content, store)
        return _written(folder, store, {"name": name, "path": model.path, "content": content}, chosen, options)


class _Loaded(ExitStack):
    """The model, its engine and tokenizer, loaded at the first suite that is not finished."""

    def __init__(self, model: ModelConfig, options: Options, devices: DevicesConfig):
        super().__init__()
        self._model, self._options, self._device = model, options, take_device(devices)
        self._parts: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
        self._engine: Engine | None = None

    def parts(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if self._parts is None:
            if is_reward_model(self._model):
                raise ModelError(
                    f"{self._model.path} is a reward model, which scores completions and generates none: evaluate it "
                    "on pairs (--suite hh, or a suite with `kind: preference`)"
                )
            tokenizer = load_tokenizer(self._model)
            policy = load_model(self._model, "lm", compute_dtype(self._model, self._device), self._device)
            self._parts = policy, tokenizer
        return self._parts

    def run(self, items: Items, sampling: Sampling, setting: str, content: str, store: EvaluationStore) -> None:
        suite, key = items.suite, f"{items.suite.name} {setting}".strip()
        shown = _shown(sampling) if suite.kind == "generate" else {}
        facts = {
            "model": content,
            "items": items.digest,
            "engine": self._options.engine if suite.kind == "generate" else "scorer",
            "sampling": shown,
            "rule": suite.rule,
            "template": suite.template,
            "system prompt": suite.system_prompt,
            "dtype": self._model.dtype,
        }
        if store.summary(key) is not None and store.facts(key) == facts:
            return
        samples = sampling.num_generations if suite.kind == "generate" else 1
        with Judge(suite, self._options.workers, self._options.deadline) as judge:
            answers = self._answers(items, sampling)
            run(
                items,
                answers,
                judge,
                samples,
                store=store,
                key=key,
                setting=setting,
                facts=facts,
                sampling=shown,
            )

    def _answers(self, items: Items, sampling: Sampling) -> Answers:
        policy, tokenizer = self.parts()
        prompts = ask(items.suite, items.items, tokenizer, policy)
        if items.suite.kind == "choices":
            return Chosen(items.suite, Scorer(policy), tokenizer, prompts, self._device)
        if self._engine is None:
            longest = max((len(one.tokens) for one in prompts.values() if isinstance(one, Prompt)), default=1)
            made = make_engine(self._options.engine, policy, tokenizer, vllm=self._options.vllm, longest_prompt=longest)
            self._engine = self.enter_context(closing(made))
        stops = replace(sampling, stop_token_ids=stop_token_ids(policy, tokenizer))
        return Generated(self._engine, stops, tokenizer, prompts)


def _sampling(suite: SuiteConfig, options: Options, setting: Setting) -> Sampling:
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
    folder: Path, store: EvaluationStore, model: Mapping[str, Any], chosen: Sequence[Items], options: Options
) -> dict[str, Any]:
    if options.calibrate:
        for items in chosen:
            _calibrate(items, store, options)
    about = {"posttrain": __version__, "created": datetime.now(UTC).isoformat(timespec="seconds")}
    summary = write_files(folder, store, model, about)
    for items in chosen:
        if items.suite.outputs is not None:
            save_json(folder / items.suite.outputs, list(_outputs(items, store, str(model["name"]))))
    return summary


def _calibrate(items: Items, store: EvaluationStore, options: Options) -> None:
    """Add `calibration` to the summaries of the suite, where its rule compares answers."""
    if items.suite.rule not in CALIBRATED or items.suite.kind != "generate":
        return
    for key, summary in store.summaries().items():
        if summary["suite"] == items.suite.name and "calibration" not in summary:
            found = calibrate(items, list(store.answers(key)), options.workers, options.deadline)
            store.finish(key, summary | {"calibration": found})


def _outputs(items: Items, store: EvaluationStore, generator: str) -> Iterator[dict[str, Any]]:
    """The first completion of every item, in AlpacaEval's format of model outputs."""
    fields = {item.id: item.fields for item in items.items}
    for answer in store.answers(items.suite.name):
        if answer.sample == 0 and answer.finish_reason:
            row = fields[answer.item]
            yield {
                "instruction": row.get("instruction", answer.prompt),
                "output": answer.completion,
                "generator": generator,
                "dataset": answer.group,
            }
