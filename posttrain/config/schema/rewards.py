"""The `rewards:` list of an online run: each entry's type, weight and settings. Does not import torch."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from posttrain.config.schema.base import Conflicts, Settings, from_text, setting
from posttrain.config.schema.judge import ScoreSettings
from posttrain.config.schema.types import FUNCTION, AboveZero, Float, Label, ModelPath, Natural, Positive, Text, is_own

RuleName = Literal[
    "match_format_exactly", "match_format_approximately", "check_answer", "check_numbers", "math", "gsm8k",
    "r1_zero", "question_only",
]  # fmt: skip


class RewardTerm(Settings):
    """Settings of every reward."""

    loads_model: ClassVar[bool] = False

    weight: Float = setting(1.0, "Weight of the reward in the sum; 0: logged, not trained on.")
    name: Label | None = setting(None, "Name in metrics and logs; null: the type, or the function's name.")


class RuleReward(RewardTerm):
    """A rule, applied in worker processes: it checks the tagged format or the answer."""

    type: RuleName = Field(description="Name of the rule.")


class LengthReward(RewardTerm):
    """-|tokens - target| * scale (Aggarwal and Welleck 2025)."""

    type: Literal["length"] = Field(description="Penalty on the distance to a target length.")
    target: Positive = Field(description="Target length of the completion in tokens.")
    scale: AboveZero = setting(0.0003, "Penalty per token of difference.")


class OverlongReward(RewardTerm):
    """0, falling linearly to -1 over the last `cache` tokens (DAPO, Yu et al. 2025, eq. 13)."""

    type: Literal["overlong"] = Field(description="Soft penalty on completions near the length limit.")
    cache: Positive = Field(description="Number of tokens before the limit over which the penalty grows.")
    max_completion_length: Positive | None = setting(
        None, "Length from which the penalty is -1; null: rollout.max_completion_length."
    )

    def check(self) -> Conflicts:
        if self.max_completion_length is not None and self.cache > self.max_completion_length:
            yield "cache", f"is {self.cache}, above max_completion_length, {self.max_completion_length}"


class RepetitionReward(RewardTerm):
    """`max_penalty` times the share of n-grams of tokens that repeat an earlier one (Yeo et al. 2025)."""

    type: Literal["repetition"] = Field(description="Repetition penalty.")
    ngram_size: Positive = setting(3, "Length of an n-gram in tokens.")
    max_penalty: Annotated[Float, Field(le=0)] = setting(-1.0, "Penalty if every n-gram repeats.")


class ModelReward(RewardTerm):
    """A trained reward model: from a path, or from an earlier stage."""

    loads_model = True
    model_config = ConfigDict(populate_by_name=True)
    type: Literal["model"] = Field(description="A reward model.")
    path: ModelPath | None = setting(None, "Hub id or folder of the reward model.")
    from_stage: Text | None = Field(default=None, alias="from", description="Stage that trains the reward model.")
    strip_thinking: bool = setting(False, "Whether to score only what follows the last </think>.")

    def check(self) -> Conflicts:
        if (self.path is None) == (self.from_stage is None):
            yield "path", "or `from`, the stage that trains the reward model: give one of the two"


class PythonReward(RewardTerm):
    """A user-defined function."""

    type: Literal["python"] = Field(description="A Python function.")
    function: Annotated[str, Field(pattern=FUNCTION)] = Field(
        description="The function, as module:function or FILE.py:FUNCTION."
    )
    timeout: Annotated[Float, Field(gt=0, le=86_400)] | None = setting(
        None, "Timeout of a call in seconds, after which its completions receive no reward."
    )
    retries: Natural = setting(0, "Number of retries of a call that raised or timed out.")


class JudgeReward(RewardTerm, ScoreSettings):
    """A language model behind an OpenAI-compatible API, which scores each completion."""

    type: Literal["judge"] = Field(description="A judge model.")
    strip_thinking: bool = setting(False, "Whether to score only what follows the last </think>.")


Reward = Annotated[
    RuleReward | LengthReward | OverlongReward | RepetitionReward | ModelReward | PythonReward | JudgeReward,
    Field(discriminator="type"),
    from_text("type"),
    # called before `from_text`, because it stands after it
    BeforeValidator(lambda value: {"type": "python", "function": value} if is_own(value) else value),
]

ALL_ZERO = "all rewards have weight 0, so no completion has a total reward; give one of them a different weight"


def term_name(reward: Reward) -> str:
    """The reward's name in metrics."""
    return reward.name or reward.type


def named_by_function(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
    """The rewards, each function under its own name unless another reward has that."""
    own = (each.function.rpartition(":")[2] if isinstance(each, PythonReward) else each.type for each in rewards)
    names = [each.name or name for each, name in zip(rewards, own, strict=True)]
    return tuple(
        each if names.count(name) > 1 else each.model_copy(update={"name": name})
        for each, name in zip(rewards, names, strict=True)
    )


def check_rewards(rewards: Sequence[Reward]) -> Conflicts:
    """Report rewards that would overwrite each other in metrics, and a list in which none is trained on."""
    if rewards and not any(reward.weight for reward in rewards):
        yield "rewards.0.weight", f"is 0: {ALL_ZERO}"
    named = [term_name(reward) for reward in named_by_function(rewards)]
    for index, name in enumerate(named):
        if name in named[:index]:
            yield f"rewards.{index}.name", f"would be {name!r}, which is the name of an earlier reward"
