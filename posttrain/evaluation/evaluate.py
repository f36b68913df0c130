"""`posttrain eval`: suites of questions answered by a model, or by recorded completions, graded and stored."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.base.console import progress
from posttrain.base.errors import DataError, ModelError
from posttrain.base.log import log
from posttrain.base.threads import sharing_cores
from posttrain.base.words import counted, last_box
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.options import EvalOptions
from posttrain.config.schema.suite import CALIBRATED, OF_ENVIRONMENT
from posttrain.data.prompts import Prompt
from posttrain.data.readers import read_files
from posttrain.data.report import Malformed
from posttrain.data.sources import Files
from posttrain.engines import Engine, Sampling, make_engine
from posttrain.evaluation.answering import Acted, Answers, Chosen, Generated, Recorded, ask, episodes_of, stops_of
from posttrain.evaluation.items import Items
from posttrain.evaluation.pairs import Preferred, Scored, pair_facts, pairs_for
from posttrain.evaluation.records import Answer, EvaluationStore, write_files
from posttrain.evaluation.running import RULES, Judge, finished, run
from posttrain.grading.extract import marked_answer
from posttrain.grading.pool import Pool
from posttrain.grading.verdict import GradeRequest
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import is_reward_model, load_model, load_tokenizer
from posttrain.runs.files import save_json
from posttrain.runs.inputs import content_of
from posttrain.runs.provenance import now

SHOWN = 50  # disagreements that --calibrate lists
OWN = "posttrain.evaluation.rules"
ACTING = (
    "environments", "tools", "max_prompt_length", "max_turns", "max_tool_calls", "max_tool_result", "rewritten_turns",
)  # fmt: skip


def evaluate_recorded(file: Path, chosen: Sequence[Items], options: EvalOptions, folder: Path) -> dict[str, Any]:
    """Grade a file's completions as answers to the suites. Returns the summary, which is also written to the folder."""
    column = options.completion_column
    if other := next((items.suite for items in chosen if items.suite.kind != "generate"), None):
        raise DataError(f"{file}: recorded completions cannot answer the suite {other.name} of kind {other.kind}")
    if other := next((items.suite for items in chosen if items.suite.rule == OF_ENVIRONMENT), None):
        raise DataError(f"{file}: the suite {other.name} is graded by its environment, which needs a model: give one")
    content, records = f"sha256 {Files((file,)).digest}", list(read_files((file,)))
    about = {"name": file.stem, "path": str(file), "content": content}
    with EvaluationStore(folder, options.overwrite) as store:
        store.is_of(content)
        every = [Recorded(one.suite, one.items, records, column, options.num_generations) for one in chosen]
        for items in chosen if len(chosen) > 1 else ():  # so that a wrong rule is found before work starts
            Judge(items.suite, options.workers, options.deadline).close()
        for items, answers in zip(chosen, every, strict=True):
            suite, key = items.suite, items.suite.name
            if answers.unused:
                rows = f"{counted(answers.unused, 'row')} of {len(records):,}"
                log.warning("%s: %s unused: they have no completion, or match no chosen item of %s", file, rows, key)
            facts = {"model": content, "column": column, "samples": answers.samples}
            facts |= {"items": items.digest, "rule": suite.rule}
            if not finished(store, key, facts):
                with Judge(suite, options.workers, options.deadline) as judge:
                    sampling = {"recorded": column}
                    run(items, answers, judge, answers.samples, store=store, key=key, facts=facts, sampling=sampling)
                _write(folder, store, about, {}, options)
        return _write(folder, store, about, {items.suite.name: items for items in chosen}, options)


@sharing_cores()
def evaluate(
    model: ModelConfig, name: str, chosen: Sequence[Items], options: EvalOptions, devices: DevicesConfig, folder: Path
) -> dict[str, Any]:
    """Answer the suites with a model. Returns the summary, which is also written to the folder, with every answer.

    The model is loaded only if an evaluation is not finished; for suites of pairs it may be a reward model. What every
    suite needs is checked before the first one starts. Each suite is added to the summary as soon as it is finished.

    Raises RunError, before any work, if an evaluation in the folder has another model or other settings.
    """
    content = content_of(model)
    evaluations = [one for items in chosen for one in _evaluations(items, model, content, options)]
    with EvaluationStore(folder, options.overwrite) as store, _Loaded(model, options, devices) as loads:
        store.is_of(content)
        about = {"name": name, "path": model.path, "content": content}
        left = [one for one in evaluations if not finished(store, one.key, one.facts)]
        loads.check({one.items.suite.name: one.items for one in left}.values())
        for one in left:
            loads.run(one, store)
            _write(folder, store, about, {}, options)
        return _write(folder, store, about, {one.key: one.items for one in evaluations}, options)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """One suite with one setting, stored under `key`; `facts` identify it."""

    items: Items
    sampling: Sampling
    setting: str
    facts: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{self.items.suite.name} {self.setting}".strip()


def _evaluations(items: Items, model: ModelConfig, content: str, options: EvalOptions) -> Iterator[_Evaluation]:
    suite, generates = items.suite, items.suite.kind == "generate"
    for setting in options.swept if generates else [{}]:
        sampling = Sampling(
            temperature=setting.get("temperature", suite.temperature),
            top_p=setting.get("top_p", 1.0),
            top_k=options.top_k,
            min_p=options.min_p,
            max_completion_length=options.max_completion_length or suite.max_completion_length,
            num_generations=options.num_generations or suite.num_generations,
            stop=suite.stop,
            seed=options.seed,
        )
        shown = asdict(sampling) | {"stop": list(sampling.stop)}  # as JSON reads it back
        del shown["stop_token_ids"]  # they belong to the model
        named = " ".join(f"{key}={value:g}" for key, value in setting.items()) if len(options.swept) > 1 else ""
        facts = {
            "model": content,
            "items": items.digest,
            "engine": options.engine if generates else "scorer",
            "sampling": shown if generates else {},
            "rule": suite.rule,
            "template": suite.template,
            "system prompt": suite.system_prompt,
            "dtype": model.dtype,
        }
        facts |= {"chat_template_kwargs": suite.chat_template_kwargs} if suite.chat_template_kwargs else {}
        if suite.acts:
            acting = suite.model_dump(mode="json", by_alias=True, include={*ACTING})  # as JSON reads it back
            facts |= {name: value for name, value in acting.items() if value}
        if suite.kind == "preference":
            facts = pair_facts(model, suite, options, content)
        yield _Evaluation(items, sampling, named, facts)


class _Loaded(ExitStack):
    """The model, its engine and tokenizer, loaded at the first suite that is not finished."""

    def __init__(self, model: ModelConfig, options: EvalOptions, devices: DevicesConfig):
        super().__init__()
        self._model, self._options, self._device = model, options, take_device(devices)
        self._prompts: dict[str, Mapping[int, Prompt | Malformed]] = {}  # by suite, for all settings

    @cached_property
    def scored(self) -> Scored:
        kind, tokenizer = "reward" if is_reward_model(self._model) else "lm", load_tokenizer(self._model)
        return load_model(self._model, kind, compute_dtype(self._model, self._device), self._device), tokenizer

    @cached_property
    def _engine(self) -> Engine:
        """The engine, sized for the prompts so far."""
        every = [prompt for prompts in self._prompts.values() for prompt in prompts.values()]
        longest = max((len(prompt.tokens) for prompt in every if isinstance(prompt, Prompt)), default=1)
        return self.enter_context(closing(make_engine(self._options.engine, *self.scored, longest_prompt=longest)))

    def check(self, chosen: Collection[Items]) -> None:
        """With several suites, raise errors of rules, templates, rows and the engine before the first one starts."""
        if len(chosen) < 2:
            return
        for suite in [items.suite for items in chosen if items.suite.kind != "preference"]:
            self._refuse_reward_model()
            Judge(suite, self._options.workers, self._options.deadline).close()
        for items in chosen:
            if items.suite.kind == "preference":
                pairs_for(self._model, self.scored, items.suite, self._options)
            else:
                self._prompts_of(items)
        for suite in [items.suite for items in chosen if items.suite.kind == "generate"]:
            engine, most = self._engine, self._options.max_completion_length or suite.max_completion_length
            with episodes_of(suite, engine, most, *self.scored) if suite.acts else nullcontext():
                pass

    def _refuse_reward_model(self) -> None:
        if is_reward_model(self._model):
            raise ModelError(
                f"{self._model.path} is a reward model, which scores completions but cannot generate: evaluate it "
                "on pairs (--suite hh, or a suite with `kind: preference`)"
            )

    def run(self, one: _Evaluation, store: EvaluationStore) -> None:
        suite, stored_as = one.items.suite, {"key": one.key, "setting": one.setting}
        samples = one.sampling.num_generations if suite.kind == "generate" else 1
        if suite.kind != "preference":
            self._refuse_reward_model()
        with Judge(suite, self._options.workers, self._options.deadline) as judge:
            if suite.kind == "preference":
                answers = Preferred(self._model, self.scored, suite, self._options, one.facts["items"])
                items, sampling = answers.items, answers.sampling
            else:
                items, answers, sampling = one.items, self._answers(one.items, one.sampling), one.facts["sampling"]
            run(items, answers, judge, samples, store=store, **stored_as, facts=one.facts, sampling=sampling)

    def _answers(self, items: Items, sampling: Sampling) -> Answers:
        (policy, tokenizer), prompts = self.scored, self._prompts_of(items)
        if items.suite.kind == "choices":
            return Chosen(items.suite, policy, tokenizer, prompts)
        stops = stops_of(items.suite, policy, tokenizer)
        if not stops and not sampling.stop:
            log.warning(
                "neither %s nor its tokenizer has a stop token, so every completion runs to %d tokens: set the "
                "tokenizer's eos_token, or give --stop",
                self._model.path,
                sampling.max_completion_length,
            )
        sampling = replace(sampling, stop_token_ids=stops)
        if items.suite.acts:
            made = episodes_of(items.suite, self._engine, sampling.max_completion_length, policy, tokenizer)
            return Acted(items.suite, self.enter_context(made), sampling, prompts)
        return Generated(self._engine, sampling, tokenizer, prompts)

    def _prompts_of(self, items: Items) -> Mapping[int, Prompt | Malformed]:
        name, (policy, tokenizer) = items.suite.name, self.scored
        if name not in self._prompts:
            self._prompts[name] = ask(items.suite, items.items, tokenizer, policy)
        return self._prompts[name]


def _write(
    folder: Path, store: EvaluationStore, model: Mapping[str, Any], complete: Mapping[str, Items], options: EvalOptions
) -> dict[str, Any]:
    """Write the files, and the calibrations and outputs of `complete` suites. Returns the summary."""
    for key, items in complete.items() if options.calibrate else ():
        known = store.summaries()[key]  # `calibration` is added if the suite's rule compares answers
        if items.suite.rule in CALIBRATED and items.suite.kind == "generate" and "calibration" not in known:
            agreement = calibrate(items, list(store.answers(key)), options.workers, options.deadline)
            store.finish(key, known | {"calibration": agreement})
    summary = write_files(folder, store, model, now())
    first = {items.suite.outputs: key for key, items in reversed([*complete.items()])}  # in a sweep, the first setting
    for name, key in first.items():
        if name:
            save_json(folder / name, list(_outputs(key, complete[key], store, str(model["name"]))))
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


def calibrate(items: Items, answers: Sequence[Answer], workers: int | None, deadline: float) -> dict[str, Any]:
    """Compare three verifiers on the graded answers, and find golds that the rule rejects as their own answers.

        string        the extracted answer equals the gold string, ignoring white space
        rule          the verdict of the suite's rule
        math_verify   the verdict of the package math_verify on the whole completion (Kydlicek 2025)

    A verifier that rejects right answers hides progress; one that accepts wrong answers rewards them.
    """
    graded = [answer for answer in answers if answer.verdict in ("correct", "wrong") and answer.gold is not None]
    golds = {item.id: item.gold for item in items.items if item.gold is not None}
    with Pool(workers, deadline, modules=(OWN, "posttrain.grading.symbolic", "math_verify")) as pool:
        by_string = [GradeRequest(f"{OWN}:STRING", one.extracted or "", _short(one.gold or "")) for one in graded]
        by_package = [GradeRequest(f"{OWN}:MATH_VERIFY", one.completion, _short(one.gold or "")) for one in graded]
        rule = RULES[items.suite.rule]
        themselves = [GradeRequest(rule, rf"\boxed{{{_short(gold)}}}", gold) for gold in golds.values()]
        requests = [*by_string, *by_package, *themselves]
        grades = list(progress(pool.stream(requests, count=False), f"{items.suite.name}: verifiers", len(requests)))
    n = len(graded)
    verdicts = [
        {"string": string.verdict, "rule": answer.verdict, "math_verify": package.verdict}
        for answer, string, package in zip(graded, grades[:n], grades[n : 2 * n], strict=True)
    ]
    kinds = Counter(", ".join(f"{name} {verdict}" for name, verdict in each.items()) for each in verdicts)
    differ = [pair for pair in zip(graded, verdicts, strict=True) if len({*pair[1].values()}) > 1]
    differ.sort(key=lambda pair: pair[1]["rule"] == pair[1]["math_verify"])
    return {
        "answers": n,
        "parse_failures": sum(answer.extracted is None for answer in graded),
        "agreement": dict(kinds.most_common()),
        "disagreements": [
            {"item": answer.item, "sample": answer.sample, "gold": _short(answer.gold or "")}
            | {"extracted": answer.extracted, **each}
            for answer, each in differ[:SHOWN]
        ],
        "golds": len(golds),
        "golds_rejected": [
            name for name, grade in zip(golds, grades[2 * n :], strict=True) if grade.verdict != "correct"
        ],
    }


def _short(gold: str) -> str:
    """The final answer of a gold that may be a whole solution."""
    return marked_answer(gold) or last_box(gold) or gold
