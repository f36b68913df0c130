"""A suite: the questions of an evaluation, how they are asked and how answers are graded. Does not import torch."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.schema.base import FUNCTION, Float, Int, OneOrMore, Positive, Problems, Settings, Text, Word
from posttrain.config.schema.data import Variables, check_template
from posttrain.config.schema.environments import (
    EnvironmentConfig,
    MaxToolCalls,
    MaxToolResult,
    MaxTurns,
    check_environments,
)

RULE = r"^[a-z][a-z0-9_]*$"
CALIBRATED = frozenset({"math", "gsm8k"})  # rules whose verdicts are compared with those of other verifiers
OF_ENVIRONMENT = "environment"  # the rule that takes the environment's reward
LM_EVAL = "lm-eval:"  # prefix that marks lm-eval's tasks among the names of suites


Alternatives = Annotated[tuple[Text, ...], OneOrMore, Field(min_length=1)]


class SuiteConfig(Settings):
    """A suite, as in a file of `posttrain/evaluation/suites/` or of a user. `{name}` in strings is replaced by a field
    of the row; other braces are left unchanged."""

    name: Word = Field(description="Name in tables, metrics (eval_{name}) and records.")
    about: Text = Field(default="a suite of the user", description="Short description of the questions.")
    source: Text = Field(description="Known data set, hub id, file or folder.")
    split: Text = Field(default="test", description="Split of a hub data set.")
    rows: Annotated[Text, Field(pattern=FUNCTION)] | None = Field(
        default=None, description="module:function(source, split) that yields rows as dicts; null: as in data.source."
    )
    columns: dict[str, Alternatives] = Field(
        default={},
        description="Fields made from the columns of a row: for each, a column or a string with {column}; of several, "
        "the first whose columns the row has.",
    )
    kind: Literal["generate", "choices", "preference"] = Field(
        default="generate",
        description="generate: completions are graded; choices: the likeliest of given continuations is the answer; "
        "preference: chosen and rejected completions are compared.",
    )
    prompt: str | list[dict[str, str]] = Field(
        default="{problem}", description="The question as a string, or a list of messages."
    )
    template: Text = Field(
        default="auto", description="Template, as in data.template; auto: the tokenizer's if it has one, or none."
    )
    chat_template_kwargs: Variables = Field(
        default={}, description="Variables of the chat template, e.g. {enable_thinking: false}."
    )
    system_prompt: str | None = Field(default=None, description="System prompt; null: none.")
    answer: Text | None = Field(default="answer", description="Field with the right answer; null: there is none.")
    id: Text | None = Field(default=None, description="Field that identifies an item; null: the row's number.")
    group: Text | None = Field(default=None, description="Field with the item's subject or level; null: no groups.")
    rule: Annotated[Text, Field(pattern=f"{RULE}|{FUNCTION}")] = Field(
        default="math",
        description="Rule that grades a completion, or module:function as in `rewards`; environment: the environment's "
        "reward; none: no grade.",
    )
    options: dict[str, Text] = Field(
        default={}, description="Arguments of the rule, taken from fields of the row, e.g. {choices: options}."
    )
    metric: Word = Field(default="accuracy", description="Name of the mean score.")
    choices: tuple[Text, ...] = Field(
        default=(), description="Continuations to compare; the answer is the number of the right one."
    )
    shots: Annotated[Int, Field(ge=0)] = Field(
        default=0,
        description="Number of worked examples for {shots} in the prompt, from `shots_split` and the item's group.",
    )
    shots_split: Text = Field(default="dev", description="Split of the worked examples.")
    items: Positive | None = Field(default=None, description="Number of items of the whole suite; null: unknown.")
    groups: Positive | None = Field(default=None, description="Number of groups of the whole suite; null: unknown.")
    num_generations: Positive = Field(default=1, description="Number of completions per prompt.")
    temperature: Annotated[Float, Field(ge=0)] = Field(default=0.0, description="Sampling temperature; 0: greedy.")
    max_completion_length: Positive = Field(default=1024, description="Maximum number of tokens of a completion.")
    stop: Annotated[tuple[Text, ...], OneOrMore] = Field(default=(), description="Strings that end a completion.")
    environments: tuple[EnvironmentConfig, ...] = Field(
        default=(), description="Environments in which the model acts over several turns; `rule` grades its last reply."
    )
    tools: tuple[Text, ...] = Field(default=(), description="Functions that the model may call, FILE.py:FUNCTION.")
    max_prompt_length: Positive = Field(
        default=2048, description="Maximum tokens of an episode's prompt, tools included; more memory is reserved."
    )
    max_turns: MaxTurns = None
    max_tool_calls: MaxToolCalls = None
    max_tool_result: MaxToolResult = None
    outputs: Text | None = Field(
        default=None, description="File for the completions in AlpacaEval's format; null: none is written."
    )

    @property
    def acts(self) -> bool:
        """Whether the model acts over several turns."""
        return bool(self.environments or self.tools)

    def check(self, problems: Problems) -> None:
        if self.acts:
            for name in ("stop", "choices"):
                if getattr(self, name):
                    problems.add(name, "cannot be combined with environments or tools")
            if self.kind != "generate":
                problems.add("kind", "needs to be generate with environments or tools")
            if self.template not in ("auto", "chat"):
                problems.add("template", "needs to be auto or chat with environments or tools")
            check_environments(problems, self.environments, self.tools)
        if self.rule == OF_ENVIRONMENT and not self.environments:
            problems.add("rule", "is environment, but there is none: set `environments`")
        if self.template != "auto":
            check_template(problems, self.template)
        if self.kind == "choices" and len(self.choices) <= 1:
            problems.add("choices", "needs two continuations or more to compare")
        if self.kind != "choices" and self.choices:
            problems.add("choices", "has no effect without `kind: choices`")
        if self.rule != "none" and self.answer is not None and self.kind == "preference":
            problems.add("answer", "is not read with `kind: preference`: set it to null")
        for name in ("rows", "group", "id", "options", "shots"):
            if self.kind == "preference" and getattr(self, name):
                problems.add(name, "is not read with `kind: preference`")
        several = [name for name, columns in self.columns.items() if len(columns) > 1]
        if self.kind == "preference" and several:
            problems.add("columns", "takes only one column per field with `kind: preference`")
        if "{shots}" not in str(self.prompt) and self.shots:
            problems.add("shots", "is set, but the prompt has no {shots}")
