"""The settings of the data: sources, formats, templates and limits."""

import datetime
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from posttrain.base.files import table_beside
from posttrain.config.schema.base import Conflicts, Settings, from_text, setting
from posttrain.config.schema.types import PERCENTILE, AboveZero, Int, Natural, Positive, Share, Text

TEMPLATES = ("chat", "chatml", "llama3", "zephyr", "gemma", "tags", "r1_zero", "question_only", "alpaca", "none")
Format = Literal[
    "auto", "preference", "kto", "prompt_completion", "messages", "sharegpt", "alpaca", "problem_answer", "prompt",
    "text", "hh", "episode",
]  # fmt: skip
FILE_ENDING = re.compile(r"(\.(jsonl?|csv|parquet|arrow|txt|gz))+$")
PAIR_FORMATS = frozenset({"auto", "preference", "hh", "sharegpt"})
LABELLED_FORMATS = frozenset({"auto", "kto"})


class SourceConfig(Settings):
    """One source of a mixed training set."""

    source: Text = Field(description="Known data set, hub id, file, folder, module:function or `builtin:...`.")
    split: Text = setting("train", "Split of a hub data set.")
    max_rows: Positive | None = setting(None, "Number of rows to use, from the start; null: all.")
    weight: AboveZero = setting(
        1.0, "Weight of the source: 2 repeats its rows, 0.5 takes a random half; interleave: its share of the rows."
    )
    name: Text | None = setting(None, "Name of the source in metrics; null: the last part of `source`.")


SourceEntry = Annotated[SourceConfig, from_text("source", json_schema_input_type=Text | SourceConfig)]


class ValidationConfig(Settings):
    """The validation rows: exactly one of `ratio`, `rows` and `source` is set."""

    ratio: Share | None = setting(None, "Share of the training rows to hold out.")
    rows: Positive | None = setting(None, "Number of training rows to hold out.")
    source: Text | None = setting(None, "Hub id, file, folder or module:function of separate rows.")
    split: Text = setting("test", "Split of `source`.")
    max_rows: Positive | None = setting(None, "Number of rows of `source` to use, from the start.")

    def check(self) -> Conflicts:
        named = [name for name in ("ratio", "rows", "source") if getattr(self, name) is not None]
        if len(named) != 1:
            given = " and ".join(named) or "none"
            yield named[-1] if named else "", f"needs one of ratio, rows and source, not {given}"
        if self.source is None and (self.max_rows is not None or self.split != "test"):
            yield "split" if self.split != "test" else "max_rows", "has no effect without source"


class HeldOutRows(Settings):
    """Rows of another stage's training data that the other stage holds out for validation."""

    source: Text | Annotated[tuple[SourceEntry, ...], Field(min_length=1)] = Field(
        description="Source of the other stage, or the list of its sources."
    )
    split: Text = setting("train", "Split of the source.")
    max_rows: Positive | None = setting(None, "Number of rows that the other stage uses; null: all.")
    skip_rows: Natural = setting(0, "Number of rows that the other stage skips at the start.")
    ratio: Share | None = setting(None, "Share of its rows that the other stage holds out.")
    rows: Positive | None = setting(None, "Number of its rows that the other stage holds out.")
    seed: Annotated[Int, Field(ge=0, lt=2**32)] | None = setting(
        None, "Random seed of the other stage; null: the seed of this stage."
    )

    def check(self) -> Conflicts:
        if (self.ratio is None) == (self.rows is None):
            yield "rows", "or ratio is needed, but not both"


class TagsConfig(Settings):
    """The tags of `template: tags`."""

    reasoning_start: Text = setting("<start_working_out>", "Tag before the reasoning.")
    reasoning_end: Text = setting("<end_working_out>", "Tag after the reasoning.")
    solution_start: Text = setting("<SOLUTION>", "Tag before the answer.")
    solution_end: Text = setting("</SOLUTION>", "Tag after the answer.")


OWN_VARIABLES = frozenset(table_beside(__file__, "variables.yaml"))  # of every chat template, and of Jinja
SPECIAL_TOKEN = re.compile(r"(bos|eos|unk|sep|pad|cls|mask)_token")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def variables(value: Any) -> dict[str, Any]:
    """Check the variables of a chat template. Raises ValueError for a reserved or invalid name, or a non-JSON value."""
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of names to values, such as {enable_thinking: false}")
    for name in value:
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ValueError(f"{str(name)[:60]!r} cannot be the name of a chat template's variable")
        if name in OWN_VARIABLES or SPECIAL_TOKEN.fullmatch(name):
            raise ValueError(f"{name} is set for every chat template and cannot be changed")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise ValueError("has a value that is not JSON: text, number, true, false, null, list or mapping") from None
    return value


def _date(value: Any) -> Any:
    """Convert a date, or a string such as 2026-01-31, to a string."""
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError("must be a date such as 2026-01-31") from None


Date = Annotated[str, BeforeValidator(_date)]
Variables = Annotated[dict[str, Any], BeforeValidator(variables)]


def check_template(template: str) -> Conflicts:
    """Report a template that is neither a name nor a file."""
    if template not in TEMPLATES and not template.endswith(".jinja"):
        yield "template", f"is {template!r}; it must be one of {', '.join(TEMPLATES)}, or a file that ends in .jinja"


class DataConfig(Settings):
    """The data: sources, formats, templates and limits."""

    source: Text | Annotated[tuple[SourceEntry, ...], Field(min_length=1)] = Field(
        description="Known data set, hub id, file, folder, module:function, or a list of {source, split, weight, ...}."
    )
    split: Text = setting("train", "Split of a hub data set.")
    format: Format = setting("auto", "Format of the rows; auto: inferred from the columns.")
    columns: dict[str, Text] = setting({}, "Column names in the data, e.g. {chosen: better}.")
    max_rows: Positive | None = setting(None, "Number of rows to use, e.g. 200 for a quick test; null: all.")
    skip_rows: Natural = setting(0, "Number of rows to skip at the start, e.g. those that another stage trains on.")
    shuffle: bool = setting(True, "Whether to shuffle the rows; false: the file's order.")
    mixing: Literal["repeat", "interleave"] = setting(
        "repeat", "Mixing of sources: weights repeat rows, or are shares of the rows of all steps (interleave)."
    )
    validation: ValidationConfig | None = setting(
        None, "Validation rows: {ratio: 0.05}, {rows: 500} or {source: ..., split: test}."
    )
    excluded: tuple[HeldOutRows, ...] = setting(
        (), "Rows never trained on because other stages hold them out; filled in from the stages of a file."
    )
    template: Text = setting(
        "chat", "Template: chat (the model's own), another name, none, or a .jinja file; saved with the model."
    )
    tags: TagsConfig = setting(TagsConfig(), "The tags of `template: tags`.")
    chat_template_kwargs: Variables = setting(
        {}, "Variables of the chat template, e.g. {enable_thinking: false}; saved with the model."
    )
    date: Date | None = setting(
        None, "Date that the chat template may write, e.g. 2026-01-31; null: the day on which the run starts."
    )
    system_prompt: str | None = setting(None, "System prompt for conversations that have none.")
    strip_think: bool = setting(False, "Whether to remove <think>...</think> from completions.")
    max_length: Positive = setting(1024, "Maximum number of tokens of prompt and completion.")
    max_prompt_length: Literal["auto"] | Positive | Annotated[str, Field(pattern=PERCENTILE)] | None = setting(
        "auto", "Maximum prompt tokens, or a percentile (p90); auto or null: as many as leave room for a completion."
    )
    overlong: Literal["drop", "truncate", "error"] = setting(
        "drop", "Treatment of examples above the limits: drop (and count), truncate, or stop with an error."
    )

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources of a list, in metrics: the last parts of the sources, numbered where they repeat."""
        names: list[str] = []
        for entry in () if isinstance(self.source, str) else self.source:
            own = entry.name or FILE_ENDING.sub("", re.split(r"[/\\:]", entry.source.rstrip("/"))[-1])
            taken = 0 if entry.name else names.count(own)
            names.append(f"{own}-{taken + 1}" if taken else own)
        return tuple(names)

    @property
    def holds_out(self) -> bool:
        """Whether some of the training rows are held out for validation."""
        return self.validation is not None and self.validation.source is None

    def check(self) -> Conflicts:
        yield from check_template(self.template)
        if not self.is_default("tags") and self.template != "tags":
            yield "tags", f"are read by template: tags only, not by {self.template}"
        if self.chat_template_kwargs and self.template == "none":
            yield "chat_template_kwargs", "have no effect with template: none"
        most, prompt = self.max_length, self.max_prompt_length
        if isinstance(prompt, int) and prompt >= most:
            yield "max_prompt_length", f"is {prompt}, which leaves no room for a completion in max_length = {most}"
        if most < 2:
            yield "max_length", "is 1, but an example needs a token to predict from and a target"
        if not isinstance(self.source, str) and self.split != "train":
            yield "split", "must be given in each entry of source, because source is a list"
        if not isinstance(self.source, str) and self.skip_rows != 0:
            yield "skip_rows", "must not be set if source is a list"
        if isinstance(self.source, str) and self.mixing != "repeat":
            yield "mixing", "needs several sources: give source as a list of {source, weight}"
