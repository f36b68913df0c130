"""A suite: the questions of an evaluation, how they are asked and how answers are graded. Does not import torch."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.schema.base import Conflicts, Settings, setting
from posttrain.config.schema.data import Variables, check_template
from posttrain.config.schema.rollout import (
    EnvironmentConfig,
    MaxToolCalls,
    MaxToolResult,
    MaxTurns,
    RewrittenTurns,
    check_tools,
)
from posttrain.config.schema.types import FUNCTION, Natural, NonNegative, OneOrMore, Positive, Text, Texts, Word

RULE = r"^[a-z][a-z0-9_]*$"
CALIBRATED = frozenset({"math", "gsm8k"})  # rules whose verdicts are compared with those of other verifiers
OF_ENVIRONMENT = "environment"  # the rule that takes the environment's reward
LM_EVAL = "lm-eval:"  # prefix that marks lm-eval's tasks among the names of suites

Alternatives = Annotated[tuple[Text, ...], OneOrMore, Field(min_length=1)]


class SuiteConfig(Settings):
    """A suite, as in a file of `posttrain/evaluation/suites/` or of a user. `{name}` in strings is replaced by a field
    of the row; other braces are left unchanged."""

    name: Word = Field(description="Name in tables, metrics (eval_{name}) and records.")
    about: Text = setting("a suite of the user", "Short description of the questions.")
    source: Text = Field(description="Known data set, hub id, file or folder.")
    split: Text = setting("test", "Split of a hub data set.")
    rows: Annotated[Text, Field(pattern=FUNCTION)] | None = setting(
        None, "module:function(source, split) that yields rows as dicts; null: as in data.source."
    )
    columns: dict[str, Alternatives] = setting(
        {},
        "Fields made from the columns of a row: for each, a column or a string with {column}; of several, "
        "the first whose columns the row has.",
    )
    kind: Literal["generate", "choices", "preference"] = setting(
        "generate",
        "generate: completions are graded; choices: the likeliest of given continuations is the answer; "
        "preference: chosen and rejected completions are compared.",
    )
    prompt: str | list[dict[str, str]] = setting("{problem}", "The question as a string, or a list of messages.")
    template: Text = setting("auto", "Template, as in data.template; auto: the tokenizer's if it has one, or none.")
    chat_template_kwargs: Variables = setting({}, "Variables of the chat template, e.g. {enable_thinking: false}.")
    system_prompt: str | None = setting(None, "System prompt; null: none.")
    answer: Text | None = setting("answer", "Field with the right answer; null: there is none.")
    id: Text | None = setting(None, "Field that identifies an item; null: the row's number.")
    group: Text | None = setting(None, "Field with the item's subject or level; null: no groups.")
    rule: Annotated[Text, Field(pattern=f"{RULE}|{FUNCTION}")] = setting(
        "math",
        "Rule that grades a completion, or module:function as in `rewards`; environment: the environment's "
        "reward; none: no grade.",
    )
    options: dict[str, Text] = setting(
        {}, "Arguments of the rule, taken from fields of the row, e.g. {choices: options}."
    )
    metric: Word = setting("accuracy", "Name of the mean score.")
    choices: tuple[Text, ...] = setting((), "Continuations to compare; the answer is the number of the right one.")
    shots: Natural = setting(
        0, "Number of worked examples for {shots} in the prompt, from `shots_split` and the item's group."
    )
    shots_split: Text = setting("dev", "Split of the worked examples.")
    items: Positive | None = setting(None, "Number of items of the whole suite; null: unknown.")
    groups: Positive | None = setting(None, "Number of groups of the whole suite; null: unknown.")
    num_generations: Positive = setting(1, "Number of completions per prompt.")
    temperature: NonNegative = setting(0.0, "Sampling temperature; 0: greedy.")
    max_completion_length: Positive = setting(1024, "Maximum number of tokens of a completion.")
    stop: Texts = setting((), "Strings that end a completion.")
    environments: tuple[EnvironmentConfig, ...] = setting(
        (), "Environments in which the model acts over several turns; `rule` grades its last reply."
    )
    tools: tuple[Text, ...] = setting((), "Functions that the model may call, FILE.py:FUNCTION.")
    max_prompt_length: Positive = setting(
        2048, "Maximum tokens of an episode's prompt, tools included; more memory is reserved."
    )
    max_turns: MaxTurns = None
    max_tool_calls: MaxToolCalls = None
    max_tool_result: MaxToolResult = None
    rewritten_turns: RewrittenTurns = "fork"
    outputs: Text | None = setting(None, "File for the completions in AlpacaEval's format; null: none is written.")

    @property
    def acts(self) -> bool:
        """Whether the model acts over several turns."""
        return bool(self.environments or self.tools)

    def check(self) -> Conflicts:
        if self.acts:
            for name in ("stop", "choices"):
                if getattr(self, name):
                    yield name, "cannot be combined with environments or tools"
            if self.kind != "generate":
                yield "kind", "needs to be generate with environments or tools"
            if self.template not in ("auto", "chat"):
                yield "template", "needs to be auto or chat with environments or tools"
            yield from check_tools(self.environments, self.tools)
        if self.rule == OF_ENVIRONMENT and not self.environments:
            yield "rule", "is environment, but there is none: set `environments`"
        if self.template != "auto":
            yield from check_template(self.template)
        if self.kind == "choices" and len(self.choices) <= 1:
            yield "choices", "needs two continuations or more to compare"
        if self.kind != "choices" and self.choices:
            yield "choices", "has no effect without `kind: choices`"
        if self.rule != "none" and self.answer is not None and self.kind == "preference":
            yield "answer", "is not read with `kind: preference`: set it to null"
        for name in ("rows", "group", "id", "options", "shots"):
            if self.kind == "preference" and getattr(self, name):
                yield name, "is not read with `kind: preference`"
        several = [name for name, columns in self.columns.items() if len(columns) > 1]
        if self.kind == "preference" and several:
            yield "columns", "takes only one column per field with `kind: preference`"
        if "{shots}" not in str(self.prompt) and self.shots:
            yield "shots", "is set, but the prompt has no {shots}"
