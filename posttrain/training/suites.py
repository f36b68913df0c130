"""Suites during training: `evaluation.suites`, asked at every evaluation; the records are in `evaluation/step-N`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing

from torch import nn

from posttrain import __version__
from posttrain.base.errors import ConfigError
from posttrain.data.prompts import Prompt
from posttrain.engines import Engine, Sampling, make_engine
from posttrain.evaluation.answering import Answers, Found, Generated, ask, stops_of
from posttrain.evaluation.items import Item, Items, load_items
from posttrain.evaluation.judging import Judge
from posttrain.evaluation.records import EvaluationStore, write_files
from posttrain.evaluation.running import run
from posttrain.evaluation.suite import find_suite, with_settings
from posttrain.models.families import base_of
from posttrain.scoring import ValueScorer
from posttrain.training.job import Job

Sampled = Callable[..., AbstractContextManager[None]]  # a context in which a signal abandons the work


class SuiteEvaluation:
    """The suites of a run. Rows are read at its start; engine and graders start at the first evaluation.

    The embedded engine reads the policy where it is, whatever engine training samples with; `rollout.engine:
    transformers` is for models that it does not run. Greedy or not, as the suite says: the run's sampling settings are
    those of its rewards.
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
                    f"evaluation.suites: {suite.name} is of the kind {suite.kind}; `posttrain eval` asks it"
                )
            source = {} if entry.source is None else {"source": entry.source}
            self._chosen.append(load_items(with_settings(suite, source), entry.max_rows))
        names = [items.suite.name for items in self._chosen]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"evaluation.suites name {', '.join(sorted(twice))} twice")
        self._resources = ExitStack()
        self._made: tuple[Engine, dict[str, tuple[Answers, Judge]]] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The number of items of each suite."""
        return {one.suite.name: len(one.items) for one in self._chosen}

    def __bool__(self) -> bool:
        return bool(self._chosen)

    def __call__(self, step: int, sampling: Sampled) -> dict[str, float]:
        """The metrics `{name}`, `{name}_low`, `{name}_high` of each suite with anything graded."""
        if not self._chosen:
            return {}
        if self._made is None:
            self._made = self._start()
        engine, parts = self._made
        engine.load(self._policy, step)
        folder, found = self._job.run.folder / "evaluation" / f"step-{step}", {}
        with EvaluationStore(folder, overwrite=True) as store:
            for items in self._chosen:
                answers, judge = parts[items.suite.name]
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
                names = {"value": "", "low": "_low", "high": "_high"}
                found |= {
                    items.suite.name + end: summary[key] for key, end in names.items() if summary[key] is not None
                }
            model = {"name": f"{self._job.run.folder.name}/step-{step}", "path": str(folder), "content": None}
            write_files(folder, store, model, {"posttrain": __version__})
        engine.release()
        return found

    def close(self) -> None:
        self._resources.close()
        self._made = None

    def _start(self) -> tuple[Engine, dict[str, tuple[Answers, Judge]]]:
        job, enter = self._job, self._resources.enter_context
        policy, tokenizer, date = base_of(self._policy), job.tokenizer, job.config.data.date
        version = job.config.behavior_version
        prompts = {
            items.suite.name: ask(items.suite, items.items, tokenizer, policy, date, version) for items in self._chosen
        }
        asked = [prompt for some in prompts.values() for prompt in some.values()]
        longest = max((len(prompt.tokens) for prompt in asked if isinstance(prompt, Prompt)), default=1)
        name = "transformers" if job.config.rollout.engine == "transformers" else "embedded"
        engine = enter(closing(make_engine(name, self._policy, tokenizer, longest_prompt=longest)))
        parts = {}
        for items in self._chosen:
            suite = items.suite
            sampling = Sampling(
                temperature=suite.temperature,
                max_completion_length=suite.max_completion_length,
                num_generations=suite.num_generations,
                stop_token_ids=stops_of(suite, self._policy, tokenizer, job.stops_at_turns),
                stop=suite.stop,
                seed=job.config.seed,
            )
            answers = Generated(engine, sampling, tokenizer, prompts[suite.name])
            parts[suite.name] = answers, enter(Judge(suite))
        return engine, parts


class _Abandonable:
    """Answers that a signal interrupts."""

    def __init__(self, answers: Answers, sampling: Sampled):
        self._answers, self._sampling = answers, sampling
        self.prompts = answers.prompts

    def __call__(self, items: Sequence[Item], found: Found) -> None:
        with self._sampling(evaluating=True):
            self._answers(items, found)
