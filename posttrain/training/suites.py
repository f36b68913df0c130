"""The suites of a run: questions that the policy is asked at every evaluation, with records as of `posttrain eval`."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import cached_property

from torch import nn

from posttrain.base.errors import ConfigError
from posttrain.data.prompts import Prompt
from posttrain.engines import Engine, Sampling, make_engine
from posttrain.evaluation.answering import Acted, Answers, Found, Generated, ask, episodes_of, stops_of
from posttrain.evaluation.items import Item, Items, load_items
from posttrain.evaluation.records import EvaluationStore, write_files
from posttrain.evaluation.running import Judge, run
from posttrain.evaluation.suite import find_suite, with_settings
from posttrain.models.families import base_of
from posttrain.scoring import ValueScorer
from posttrain.training.evaluation import SamplingContext
from posttrain.training.job import Job


class SuiteEvaluation:
    """Evaluates the suites of `evaluation.suites`; the records are stored in `evaluation/step-N`.

    Rows are read at the start of the run; engine and graders start at the first evaluation. Suites are answered by the
    embedded engine with the policy's own modules, whichever engine training uses. With `rollout.engine: transformers`,
    for models that the embedded engine does not support, that engine answers. Each suite sets its sampling.
    """

    def __init__(self, job: Job, policy: nn.Module):
        self._job, self._policy = job, policy.model if isinstance(policy, ValueScorer) else policy
        settings = job.config.evaluation
        entries = settings.suites if settings.eval_steps > 0 else ()
        self._chosen: list[Items] = []
        for entry in entries:
            suite = find_suite(entry.suite)
            if suite.kind != "generate":
                raise ConfigError(
                    f"evaluation.suites: {suite.name} is a suite of the kind {suite.kind}: use `posttrain eval` for it"
                )
            source = {} if entry.source is None else {"source": entry.source}
            self._chosen.append(load_items(with_settings(suite, source), entry.max_rows))
        names = [items.suite.name for items in self._chosen]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"evaluation.suites lists {', '.join(sorted(twice))} twice")
        self.sizes = {items.suite.name: len(items.items) for items in self._chosen}  # number of items
        self._resources = ExitStack()

    def __call__(self, step: int, sampling: SamplingContext) -> dict[str, float]:
        """The metrics `{name}`, `{name}_low` and `{name}_high` of each suite in which anything was graded."""
        if not self._chosen:
            return {}
        engine, parts = self._started
        engine.load(self._policy, step)
        folder, metrics = self._job.run.folder / "evaluation" / f"step-{step}", {}
        with EvaluationStore(folder, overwrite=True) as store:
            for items, answers, judge in parts:
                summary = run(
                    items,
                    _Abandonable(answers, sampling),
                    judge,
                    items.suite.num_generations,
                    store=store,
                    key=items.suite.name,
                    facts={"step": step, "items": items.digest},
                    sampling={"step": step},
                )
                for key, suffix in {"value": "", "low": "_low", "high": "_high"}.items():
                    if summary[key] is not None:
                        metrics[items.suite.name + suffix] = summary[key]
            model = {"name": f"{self._job.run.folder.name}/step-{step}", "path": str(folder), "content": None}
            write_files(folder, store, model)
        engine.release()
        return metrics

    def close(self) -> None:
        self._resources.close()

    @cached_property
    def _started(self) -> tuple[Engine, list[tuple[Items, Answers, Judge]]]:
        job, enter = self._job, self._resources.enter_context
        policy, tokenizer, date = base_of(self._policy), job.tokenizer, job.config.data.date
        version = job.config.behavior_version
        prompts = [ask(items.suite, items.items, tokenizer, policy, date, version) for items in self._chosen]
        every = (prompt for of_suite in prompts for prompt in of_suite.values())
        longest = max((len(prompt.tokens) for prompt in every if isinstance(prompt, Prompt)), default=1)
        name = "transformers" if job.config.rollout.engine == "transformers" else "embedded"
        engine = enter(closing(make_engine(name, self._policy, tokenizer, longest_prompt=longest)))
        parts = []
        for items, asked in zip(self._chosen, prompts, strict=True):
            suite = items.suite
            sampling = Sampling(
                temperature=suite.temperature,
                max_completion_length=suite.max_completion_length,
                num_generations=suite.num_generations,
                stop_token_ids=stops_of(suite, self._policy, tokenizer, job.stops_at_turns),
                stop=suite.stop,
                seed=job.config.seed,
            )
            if suite.acts:
                made = episodes_of(suite, engine, suite.max_completion_length, policy, tokenizer, date, version)
                answers = Acted(suite, enter(made), sampling, asked)
            else:
                answers = Generated(engine, sampling, tokenizer, asked)
            parts.append((items, answers, enter(Judge(suite))))
        return engine, parts


class _Abandonable:
    """Answers a suite's items; a signal interrupts the sampling."""

    def __init__(self, answers: Answers, sampling: SamplingContext):
        self._answers, self._sampling = answers, sampling
        self.prompts = answers.prompts

    def __call__(self, items: Sequence[Item], found: Found) -> None:
        with self._sampling(evaluating=True):
            self._answers(items, found)
