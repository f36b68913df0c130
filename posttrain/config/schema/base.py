"""What every settings class shares: frozen, no unknown keys, and checks that name the field they complain about."""

import re
from os.path import expanduser
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from posttrain.terminal import CONTROLS


class Settings(BaseModel):
    """A group of settings. Frozen; an unknown key is an error; infinities and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


# What an example is made of: a single sequence, a pair of completions, one completion with a label, or a prompt alone.
Kind = Literal["sft", "pair", "unpaired", "prompt"]


class MethodSettings(Settings):
    """What every method says of itself, beside its settings."""

    kind: ClassVar[Kind] = "pair"
    dropout: ClassVar[bool] = False  # whether it trains with the model's; a policy that is compared is scored without
    warmup_from_zero: ClassVar[bool] = True  # whether the first step of warm-up has the rate 0, as in transformers
    # The defaults, of full fine-tuning and of LoRA, which takes about ten times more where a likelihood is learnt.
    learning_rates: ClassVar[tuple[float, float]]

    head: ClassVar[Literal["lm", "reward"]] = "lm"  # what reads the last hidden states
    learns_ties: ClassVar[bool] = False  # whether a pair may have no better completion
    samples_completions: ClassVar[bool] = False  # whether it trains on completions of its own, sampled at every step
    needs_rewards: ClassVar[bool] = False  # whether it learns from what completions are worth

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return 1

    @property
    def completions_per_prompt(self) -> int:
        """Completions that a step samples for each of its prompts."""
        return 0

    @property
    def regrades_exactly(self) -> bool:
        """Whether the advantages of stored completions under other rewards are those that a run would have had."""
        return True

    @property
    def scores_reference(self) -> bool:
        """Whether a reference model scores what is trained on, at every step."""
        return False

    @property
    def reference_path(self) -> str | None:
        """Hub id or folder of the reference; None: the model itself before training."""
        return getattr(self, "ref_model", None)

    @property
    def reads_completions(self) -> bool:
        """Whether prompts come with the data's own completions, to be trained on too."""
        return False

    @property
    def joins_completions(self) -> bool:
        """Whether a prompt is scored with two completions at a time: a pair's, or its own and another's."""
        return self.kind == "pair"


class SettingsConflict(ValueError):
    """Settings that are valid one by one but not together: each problem names the path of the field to change."""

    def __init__(self, problems: list[tuple[str, str]]):
        self.problems = problems
        super().__init__("; ".join(f"{path}: {message}" for path, message in problems))


class Problems:
    """Collects the conflicts among the settings of one group, so that all of them are reported at once."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def check(self, holds: bool, path: str, message: str) -> None:
        """Note `message` about the field at `path` (dotted, relative to the group) unless the condition holds."""
        if not holds:
            self.found.append((path, message))

    def report(self) -> None:
        """Raise SettingsConflict if anything was found."""
        if self.found:
            raise SettingsConflict(self.found)


def _not_bool(value: Any) -> Any:
    # Python counts True as 1; `max_steps: true` is a mistake, not one step.
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


def _one_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool)]
Positive = Annotated[Int, Field(ge=1)]
Share = Annotated[Float, Field(gt=0.0, lt=1.0)]
OneOrMore = BeforeValidator(_one_as_list)
Text = Annotated[str, Field(min_length=1)]
Place = Annotated[Text, AfterValidator(expanduser)]  # a hub id, or a folder, of which `~` is the user's own
RefModel = Annotated[
    Place | None, Field(description="Hub id or folder of another reference; null: the model itself before training.")
]
Precompute = Annotated[
    bool, Field(description="Compute the reference's log-probabilities before training, and cache them.")
]


class OnOff:
    """Mark of a group of settings that may be given as `true` (its defaults) or `false` (none) as well.

    Layers spell these short forms out (posttrain/config/reading/layers.py); flags, messages and docs read the mark.
    """


# Patterns of text settings, and how a message puts them. A name is more than dots: `.` and `..` are other folders.
NAME_BYTES = 200  # file systems take 255; the rest is for endings such as .tmp-12345
LINE = rf"^[^{CONTROLS}]+$"
FILE_NAME = rf"^[^/\\{CONTROLS}]*[^./\\\s{CONTROLS}][^/\\{CONTROLS}]*$"
WORD = r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$"
PERCENTILE = r"^p([1-9]\d?|100)$"
FUNCTION = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
EVAL_METRIC = rf"^(auto|eval_[^{CONTROLS}]+)$"
PATTERNS = {
    LINE: "without control characters",
    FILE_NAME: f"of at most {NAME_BYTES} bytes that can name a folder",
    WORD: f"of at most {NAME_BYTES} letters, digits, `_`, `-` and `.`",
    PERCENTILE: "such as p90",
    FUNCTION: "such as module:function",
    EVAL_METRIC: "that begins with eval_, auto",
}


def is_name(text: str, pattern: str = FILE_NAME) -> bool:
    """Whether a text is short enough for a name and of the pattern of one."""
    return len(text.encode(errors="replace")) <= NAME_BYTES and re.fullmatch(pattern, text) is not None


def _short_enough(text: str) -> str:
    if len(text.encode()) > NAME_BYTES:
        raise ValueError(f"more than {NAME_BYTES} bytes")
    return text


Folder = Annotated[str, Field(pattern=LINE)]  # a folder's path
FolderName = Annotated[str, Field(pattern=FILE_NAME), AfterValidator(_short_enough)]
Label = Annotated[str, Field(pattern=LINE), AfterValidator(_short_enough)]  # a name in metrics and logs
Word = Annotated[str, Field(pattern=WORD), AfterValidator(_short_enough)]
