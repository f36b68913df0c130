"""The settings of evaluation during training, and the direction in which each metric of an evaluation improves."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from posttrain.config.schema.base import Float, Int, OneOrMore, Positive, Problems, Settings, Text, Word, from_text
from posttrain.config.schema.data import Format, check_template
from posttrain.config.schema.rewards import Reward, check_rewards
from posttrain.config.schema.rollout import RolloutConfig

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_completion_length", "stop")
# Regular expressions of metrics, without `eval_` and the name of a validation set. Shorter lengths are better.
LOWER = (
    r"(\w+_)?loss",
    r"entropy",
    r"(\w+_)?kl",
    r"jsd",
    r"clip_ratio(/\w+)?",
    r"completions/(clipped_ratio|\w+_length)",
    r"reasoning_(length|tokens)",
    r"(logps|rewards)/rejected",
    r"reward_std",
    r"frac_reward_zero_std",
    r"resampled_groups",
    r"rewards/(left_out|left_out_ratio|no_verdict_ratio|not_applicable)",
    r"rewards/[^/]+/(std|wrong|ungraded|bad_gold|timeout|crashed|not_applicable|00|01|10|unreadable|requests|\w*tokens)",
    r"router/\w+",
)
HIGHER = (
    r"(\w+_)?accuracy",
    r"margin",
    r"(\w+_)?reward",
    r"rewards/(accuracies|margins|chosen)",
    r"logps/chosen",
    r"log_odds_(ratio|chosen)",
    r"rewards/[^/]+/(mean|correct|11)",
    r"(pass|maj)@\d+",
    r"reasoning_share",
)
# Regular expressions of the metrics of sampled completions.
OF_COMPLETIONS = (
    *(r"reward(_std)?", r"rewards/.+", r"completions/\w+", "frac_reward_zero_std", r"reasoning_\w+", r"(pass|maj)@\d+"),
    "(format|answer)_accuracy",
)
SHARES = (
    r"(\w+_)?accuracy",
    r"rewards/accuracies",
    r"(pass|maj)@\d+",
    r"reasoning_share",
    r"completions/clipped_ratio",
)


class EvaluationDataset(Settings):
    """A further data set to evaluate on. Settings that are null have the run's value."""

    name: Word = Field(description="Name in metrics: eval_{name}_loss.")
    source: Text = Field(description="Known data set, hub id, file or folder.")
    split: Text = Field(default="test", description="Split of a hub data set.")
    max_rows: Positive | None = Field(default=None, description="Number of rows to use, from the start; null: all.")
    format: Format | None = Field(default=None, description="Format of the rows; null: data.format.")
    columns: dict[str, Text] | None = Field(
        default=None, description="Column names in the data; null: those of data.columns, unless `format` is set."
    )
    template: Text | None = Field(default=None, description="Template; null: data.template.")
    rewards: tuple[Reward, ...] | None = Field(
        default=None, description="Rewards for completions of its prompts; null: those of the run."
    )
    num_batches: Positive | None = Field(default=None, description="Number of batches; null: evaluation.num_batches.")
    with_replacement: bool | None = Field(
        default=None, description="Whether every evaluation samples new rows; null: evaluation.with_replacement."
    )

    def check(self, problems: Problems) -> None:
        if self.template is not None:
            check_template(problems, self.template)
        check_rewards(problems, self.rewards or ())


class SuiteEntry(Settings):
    """A suite to evaluate on during training; just a name means {suite: NAME}."""

    suite: Text = Field(description="Built-in suite, YAML file or module:function; its metric is eval_{name}.")
    source: Text | None = Field(default=None, description="File or folder of rows; null: the suite's own source.")
    max_rows: Positive | None = Field(default=None, description="Number of items, evenly spaced; null: all.")


Suite = Annotated[SuiteEntry, from_text("suite", json_schema_input_type=Text | SuiteEntry)]


class EvaluationConfig(Settings):
    """Evaluation during training."""

    eval_steps: Int = Field(default=100, description="Number of steps between evaluations; -1: never.")
    at_start: bool = Field(default=True, description="Whether to also evaluate before the first step.")
    num_batches: Positive | None = Field(default=None, description="Number of batches per evaluation; null: all rows.")
    with_replacement: bool = Field(
        default=False, description="Whether every evaluation samples new rows for num_batches; false: the first rows."
    )
    num_generations: Positive = Field(
        default=1, description="Number of completions per validation prompt; above 1, pass@k is measured too."
    )
    temperature: Annotated[Float, Field(ge=0)] | None = Field(
        default=None, description="Temperature of validation completions, 0: greedy; null: rollout.temperature."
    )
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = Field(
        default=None, description="top_p of validation completions; null: rollout.top_p."
    )
    top_k: Annotated[Int, Field(ge=0)] | None = Field(
        default=None, description="top_k of validation completions; null: rollout.top_k."
    )
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = Field(
        default=None, description="min_p of validation completions; null: rollout.min_p."
    )
    max_completion_length: Positive | None = Field(
        default=None, description="Maximum tokens of validation completions; null: rollout.max_completion_length."
    )
    stop: Annotated[tuple[Text, ...], OneOrMore] | None = Field(
        default=None, description="Stop strings of validation completions, besides the stop token; null: rollout.stop."
    )
    datasets: tuple[EvaluationDataset, ...] = Field(
        default=(), description="Further data sets to evaluate on: a list of {name, source, split, ...}."
    )

    suites: Annotated[
        tuple[Suite, ...], BeforeValidator(lambda suites: [suites] if isinstance(suites, str | dict) else suites)
    ] = Field(
        default=(), description="Suites of questions (docs/eval.md): a list of names, or {suite, source, max_rows}."
    )

    def check(self, problems: Problems) -> None:
        steps = self.eval_steps
        if steps != -1 and steps < 1:
            problems.add("eval_steps", f"is {steps}; give 1 or more, or -1 for never")
        names = {dataset.name for dataset in self.datasets}
        if len(names) != len(self.datasets):
            problems.add("datasets", "use a name twice; their metrics would overwrite each other")
        sets = [("", self), *((f"datasets.{index}.", dataset) for index, dataset in enumerate(self.datasets))]
        for path, settings in sets:
            if settings.with_replacement and (settings.num_batches or self.num_batches) is None:
                problems.add(f"{path}with_replacement", "is true, but num_batches is null; give the number to sample")

    def sampling(self, rollout: RolloutConfig) -> RolloutConfig:
        """The sampling settings of an evaluation: those of training, overridden by the settings of this group."""
        own = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        return rollout.model_copy(update=own)


def is_one_of(names: tuple[str, ...], metric: str) -> bool:
    """Whether `eval_…` is one of these metrics, for any validation set."""
    return re.fullmatch(rf"eval_(.*_)?({'|'.join(names)})", metric) is not None


def lower_is_better(metric: str) -> bool | None:
    """Whether a metric gets better as it falls; None if the metric is not in the tables."""
    if is_one_of(LOWER, metric):
        return True
    return False if is_one_of(HIGHER, metric) else None
