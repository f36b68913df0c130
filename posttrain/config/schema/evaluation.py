"""The settings of evaluation during training, and the direction in which each metric of an evaluation improves."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from posttrain.base.files import table_beside
from posttrain.config.schema.base import Conflicts, Settings, from_text, setting
from posttrain.config.schema.data import Format, check_template
from posttrain.config.schema.rewards import Reward, check_rewards
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.types import Fraction, Int, Natural, NonNegative, Positive, Text, Texts, Word, ZeroToOne

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_completion_length", "stop")
METRICS = table_beside(__file__, "metrics.yaml")


class EvaluationDataset(Settings):
    """A further data set to evaluate on. Settings that are null have the run's value."""

    name: Word = Field(description="Name in metrics: eval_{name}_loss.")
    source: Text = Field(description="Known data set, hub id, file or folder.")
    split: Text = setting("test", "Split of a hub data set.")
    max_rows: Positive | None = setting(None, "Number of rows to use, from the start; null: all.")
    format: Format | None = setting(None, "Format of the rows; null: data.format.")
    columns: dict[str, Text] | None = setting(
        None, "Column names in the data; null: those of data.columns, unless `format` is set."
    )
    template: Text | None = setting(None, "Template; null: data.template.")
    rewards: tuple[Reward, ...] | None = setting(
        None, "Rewards for completions of its prompts; null: those of the run."
    )
    num_batches: Positive | None = setting(None, "Number of batches; null: evaluation.num_batches.")
    with_replacement: bool | None = setting(
        None, "Whether every evaluation samples new rows; null: evaluation.with_replacement."
    )

    def check(self) -> Conflicts:
        if self.template is not None:
            yield from check_template(self.template)
        yield from check_rewards(self.rewards or ())


class SuiteEntry(Settings):
    """A suite to evaluate on during training; just a name means {suite: NAME}."""

    suite: Text = Field(description="Built-in suite, YAML file or module:function; its metric is eval_{name}.")
    source: Text | None = setting(None, "File or folder of rows; null: the suite's own source.")
    max_rows: Positive | None = setting(None, "Number of items, evenly spaced; null: all.")


Suite = Annotated[SuiteEntry, from_text("suite", json_schema_input_type=Text | SuiteEntry)]


class EvaluationConfig(Settings):
    """Evaluation during training."""

    eval_steps: Int = setting(100, "Number of steps between evaluations; -1: never.")
    at_start: bool = setting(True, "Whether to also evaluate before the first step.")
    num_batches: Positive | None = setting(None, "Number of batches per evaluation; null: all rows.")
    with_replacement: bool = setting(
        False, "Whether every evaluation samples new rows for num_batches; false: the first rows."
    )
    num_generations: Positive = setting(
        1, "Number of completions per validation prompt; above 1, pass@k is measured too."
    )
    temperature: NonNegative | None = setting(
        None, "Temperature of validation completions, 0: greedy; null: rollout.temperature."
    )
    top_p: Fraction | None = setting(None, "top_p of validation completions; null: rollout.top_p.")
    top_k: Natural | None = setting(None, "top_k of validation completions; null: rollout.top_k.")
    min_p: ZeroToOne | None = setting(None, "min_p of validation completions; null: rollout.min_p.")
    max_completion_length: Positive | None = setting(
        None, "Maximum tokens of validation completions; null: rollout.max_completion_length."
    )
    stop: Texts | None = setting(
        None, "Stop strings of validation completions, besides the stop token; null: rollout.stop."
    )
    datasets: tuple[EvaluationDataset, ...] = setting(
        (), "Further data sets to evaluate on: a list of {name, source, split, ...}."
    )
    suites: Annotated[
        tuple[Suite, ...], BeforeValidator(lambda suites: [suites] if isinstance(suites, str | dict) else suites)
    ] = setting((), "Suites of questions (docs/eval.md): a list of names, or {suite, source, max_rows}.")

    def check(self) -> Conflicts:
        steps = self.eval_steps
        if steps != -1 and steps < 1:
            yield "eval_steps", f"is {steps}; give 1 or more, or -1 for never"
        names = {dataset.name for dataset in self.datasets}
        if len(names) != len(self.datasets):
            yield "datasets", "use a name twice; their metrics would overwrite each other"
        sets = [("", self), *((f"datasets.{index}.", dataset) for index, dataset in enumerate(self.datasets))]
        for path, settings in sets:
            if settings.with_replacement and (settings.num_batches or self.num_batches) is None:
                yield f"{path}with_replacement", "is true, but num_batches is null; give the number to sample"

    def sampling(self, rollout: RolloutConfig) -> RolloutConfig:
        """The sampling settings of an evaluation: those of training, overridden by the settings of this group."""
        own = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        return rollout.model_copy(update=own)


def is_one_of(kind: str, metric: str) -> bool:
    """Whether `eval_…` is a metric of this kind in metrics.yaml, for any validation set."""
    return re.fullmatch(rf"eval_(.*_)?({'|'.join(METRICS[kind])})", metric) is not None


def lower_is_better(metric: str) -> bool | None:
    """Whether a metric gets better as it falls; None if the metric is not in the tables."""
    if is_one_of("lower", metric):
        return True
    return False if is_one_of("higher", metric) else None
