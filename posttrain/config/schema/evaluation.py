"""The settings of evaluation during training: intervals, data sets, sampling."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from posttrain.config.schema.base import Float, Int, OneOrMore, Positive, Problems, Settings, Text, Word
from posttrain.config.schema.data import Format, check_template
from posttrain.config.schema.rewards import Reward, check_rewards
from posttrain.config.schema.rollout import RolloutConfig

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_completion_length", "stop")


class EvaluationDataset(Settings):
    """A further data set to evaluate on. Null settings are those of `data.validation`."""

    name: Word = Field(description="Name in metrics: eval_{name}_loss.")
    source: Text = Field(description="Known data set, hub id, file or folder.")
    split: Text = Field(default="test", description="Split of a hub data set.")
    max_rows: Positive | None = Field(default=None, description="Number of rows to use, from the start; null: all.")
    format: Format | None = Field(default=None, description="Format of the rows; null: data.format.")
    columns: dict[str, Text] | None = Field(
        default=None, description="Column names in the data; null: data.columns, or none if format is set."
    )
    template: Text | None = Field(default=None, description="Template; null: data.template.")
    rewards: tuple[Reward, ...] | None = Field(
        default=None, description="Rewards for completions of its prompts; null: those of the run."
    )
    num_batches: Positive | None = Field(default=None, description="Number of batches; null: evaluation.num_batches.")
    with_replacement: bool | None = Field(
        default=None, description="Whether every evaluation samples new rows; null: evaluation.with_replacement."
    )

    @model_validator(mode="after")
    def _check(self) -> "EvaluationDataset":
        problems = Problems()
        if self.template is not None:
            check_template(problems, self.template)
        check_rewards(problems, self.rewards or ())
        problems.report()
        return self


class SuiteEntry(Settings):
    """A suite to evaluate on during training; a name alone is {suite: NAME}."""

    suite: Text = Field(description="Built-in suite, YAML file or module:function; metric eval_{name}.")
    source: Text | None = Field(default=None, description="File or folder of its rows; null: the suite's own source.")
    max_rows: Positive | None = Field(default=None, description="Number of items, evenly spread; null: all.")


def _entry(value: Any) -> Any:
    return {"suite": value} if isinstance(value, str) else value


def _one_suite(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


Suite = Annotated[SuiteEntry, BeforeValidator(_entry, json_schema_input_type=Text | SuiteEntry)]


class EvaluationConfig(Settings):
    """Evaluation during training."""

    eval_steps: Int = Field(default=100, description="Number of steps between evaluations; -1: never.")
    at_start: bool = Field(default=True, description="Whether to evaluate before the first step too.")
    num_batches: Positive | None = Field(
        default=None, description="Number of batches of an evaluation; null: all rows."
    )
    with_replacement: bool = Field(
        default=False, description="Whether every evaluation samples new rows for num_batches; false: the first rows."
    )
    num_generations: Positive = Field(
        default=1, description="Number of completions of each validation prompt; above 1: with pass@k."
    )
    temperature: Annotated[Float, Field(ge=0)] | None = Field(
        default=None,
        description="Temperature of these completions, 0: greedy; null: rollout.temperature.",
    )
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = Field(
        default=None, description="top_p of these completions; null: rollout.top_p."
    )
    top_k: Annotated[Int, Field(ge=0)] | None = Field(
        default=None, description="top_k of these completions; null: rollout.top_k."
    )
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = Field(
        default=None, description="min_p of these completions; null: rollout.min_p."
    )
    max_completion_length: Positive | None = Field(
        default=None, description="Maximum tokens of these completions; null: the rollout's."
    )
    stop: Annotated[tuple[Text, ...], OneOrMore] | None = Field(
        default=None, description="Stop strings of these completions, besides the stop token; null: rollout.stop."
    )
    datasets: tuple[EvaluationDataset, ...] = Field(
        default=(), description="Further data sets: a list of {name, source, split, ...}."
    )

    suites: Annotated[tuple[Suite, ...], BeforeValidator(_one_suite)] = Field(
        default=(), description="Suites of questions (docs/eval.md): a list of names, or {suite, source, max_rows}."
    )

    @model_validator(mode="after")
    def _check(self) -> "EvaluationConfig":
        problems = Problems()
        problems.check(
            self.eval_steps == -1 or self.eval_steps >= 1,
            "eval_steps",
            f"is {self.eval_steps}; give 1 or more, or -1 for never",
        )
        named = [dataset.name for dataset in self.datasets]
        problems.check(
            len(set(named)) == len(named), "datasets", "have a name twice; metrics would overwrite each other"
        )
        anew = {"with_replacement": (self.with_replacement, self.num_batches)}
        for index, dataset in enumerate(self.datasets):
            own = dataset.with_replacement, dataset.num_batches or self.num_batches
            anew[f"datasets.{index}.with_replacement"] = bool(own[0]), own[1]
        for path, (wanted, batches) in anew.items():
            problems.check(
                not wanted or batches is not None, path, "is true, but num_batches is null: how many rows to sample?"
            )
        problems.report()
        return self

    def sampling(self, rollout: RolloutConfig) -> RolloutConfig:
        """The sampling settings of an evaluation: those of training, overridden here."""
        own = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        return rollout.model_copy(update=own)
