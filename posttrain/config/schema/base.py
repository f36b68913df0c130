"""Base classes of settings: they are frozen, refuse unknown keys, and have checks that name the field."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from posttrain.config.schema.types import Fraction, ModelPath, NonNegative, Positive, is_own

Conflict = tuple[str, str]  # the field to change (its dotted path), and a message
Conflicts = Iterator[Conflict]


class SettingsConflict(ValueError):
    """Raised for settings that conflict although each is valid. Every problem has the path of the field to change."""

    def __init__(self, problems: list[Conflict]):
        self.problems = problems
        super().__init__("; ".join(f"{path}: {message}" for path, message in problems))


class Settings(BaseModel):
    """A group of settings. Frozen; an unknown key is an error; infinities and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def check(self) -> Conflicts:
        """Yield the conflicts among the settings, with paths relative to the group; all are reported at once."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflicts(self) -> Self:
        if conflicts := list(self.check()):
            raise SettingsConflict(conflicts)
        return self

    def unused(self, switch: str, *names: str) -> Conflicts:
        """Yield those of the settings that are set, but have no effect because `switch` is off."""
        for name in names:
            if not getattr(self, switch) and not self.is_default(name):
                yield name, f"has no effect without {switch}; leave it out"

    def is_default(self, name: str) -> bool:
        """Whether a setting has its default value."""
        return getattr(self, name) == type(self).model_fields[name].default


def setting(default: Any, description: str) -> Any:
    """A setting that has a default; a required setting is a plain `Field`."""
    return Field(default=default, description=description)


def from_text(key: str, **schema: Any) -> BeforeValidator:
    """Read a string as a mapping with only this key, so that `math` means {type: math}."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value, **schema)


# The parts of an example: one sequence, a pair of completions, one completion with a label, or only a prompt.
KindName = Literal["sft", "pair", "unpaired", "prompt"]
MODELS = frozenset({"ref_model", "teacher"})  # settings that name a model to compare the policy with


class MethodSettings(Settings):
    """Settings of a method, and facts about it: class variables and properties that shared code reads. The method's
    computation is in its recipe (posttrain/recipes/)."""

    router_aux_loss_coef: NonNegative | None = setting(
        None, "Weight of the load-balancing loss of a mixture of experts; null: the model's value; 0: none."
    )

    # The data of the method.
    kind: ClassVar[KindName] = "pair"
    learns_ties: ClassVar[bool] = False  # whether a pair may be a tie
    samples_completions: ClassVar[bool] = False  # whether every step samples the completions to train on
    needs_rewards: ClassVar[bool] = False  # whether the method learns from rewards of completions
    example: ClassVar[tuple[str, str]]  # the model and the data of the method's starter file

    # The model.
    head: ClassVar[Literal["lm", "reward"]] = "lm"  # the head on the last hidden states
    trains_values: ClassVar[bool] = False  # whether a value head is trained alongside the policy
    dropout: ClassVar[bool] = False  # whether training uses the model's dropout; False if policies are compared
    warmup_from_zero: ClassVar[bool] = True  # whether warm-up starts at a learning rate of 0, as in transformers
    # Defaults for full fine-tuning and for LoRA, which needs about ten times the rate to learn a likelihood.
    learning_rates: ClassVar[tuple[float, float]]

    # Metrics and checks.
    measured: ClassVar[tuple[str, ...]] = ()  # metrics of an evaluation of the loss, besides the loss
    headline: ClassVar[str] = "reward"  # the main metric, which early stopping watches
    starts_as_reference: ClassVar[bool] = False  # whether the reference is, by default, the policy before training
    has_ratio: ClassVar[bool] = False  # whether the loss reads the ratio of the policy to the sampling policy

    # The losses.
    loss_setting: ClassVar[str | None] = None  # the setting that chooses among several losses
    read_by: ClassVar[tuple[tuple[str, frozenset[str]], ...]] = ()  # settings that only some of them read, and these
    own_names: ClassVar[Mapping[str, str]] = {}  # a setting's name in other methods -> its name in this method

    @classmethod
    def name(cls) -> str:
        """The value of `type`."""
        return cls.model_fields["type"].default

    @property
    def loss_name(self) -> str:
        """The name of the method's loss, for the loss lab."""
        return getattr(self, self.loss_setting or "type")

    @classmethod
    def losses(cls, run: "MethodSettings") -> list[tuple[str, dict[str, Any]]]:
        """The losses that the loss lab computes for a batch of `run`, and the settings that choose each."""
        if cls.loss_setting is None:
            return [(cls.name(), {})]
        return [(loss, {cls.loss_setting: loss}) for loss in get_args(cls.model_fields[cls.loss_setting].annotation)]

    @property
    def chosen_losses(self) -> frozenset[str]:
        """The values of `loss_setting`."""
        chosen = getattr(self, self.loss_setting or "type")
        return frozenset([chosen] if isinstance(chosen, str) else chosen)

    def reads(self, setting: str) -> bool:
        """Whether the method's loss depends on a setting. What a loss of the user's reads is known when it runs."""
        chosen = self.chosen_losses
        known = not (chosen & dict(self.read_by).get(setting, chosen) or any(map(is_own, chosen)))
        return hasattr(self, setting) and not known

    def check(self) -> Conflicts:
        for name, losses in self.read_by:
            if not self.is_default(name) and not self.reads(name):
                readers, chosen = (", ".join(sorted(some)) for some in (losses, self.chosen_losses))
                yield name, f"is read by {self.loss_setting}: {readers} only, not by {chosen}; leave it out"

    @property
    def clips(self) -> bool:
        """Whether the method's loss clips ratios."""
        return self.has_ratio

    @property
    def compares_groups(self) -> bool:
        """Whether the method compares the rewards of a prompt's completions with one another."""
        return False

    @property
    def updates(self) -> int:
        """Number of optimizer updates in a step."""
        return 1

    @property
    def completions_per_prompt(self) -> int:
        """Number of completions that a step samples per prompt."""
        return getattr(self, "num_generations", 0)

    @property
    def has_reference(self) -> bool:
        """Whether the method compares the policy with a reference or a teacher."""
        return bool(MODELS & type(self).model_fields.keys()) and not getattr(self, "reference_free", False)

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference scores all examples before training."""
        return getattr(self, "precompute_ref_log_probs", False)

    @property
    def avoids_second_model(self) -> bool:
        """Whether no second model is in memory: the reference is the policy without its adapter, or precomputed."""
        return not getattr(self, "use_ref_model", True)

    @property
    def scores_reference(self) -> bool:
        """Whether a reference model scores the examples of every step."""
        return self.has_reference and not (self.precomputes_reference or self.avoids_second_model)

    @property
    def syncs_reference(self) -> bool:
        """Whether the reference follows the policy."""
        return getattr(self, "sync_ref_model", False)

    @property
    def reference_path(self) -> str | None:
        """Hub id or folder of the reference; None: the model itself before training."""
        return next((getattr(self, name) for name in MODELS if hasattr(self, name)), None)

    @property
    def refers_to_itself(self) -> bool:
        """Whether the reference or the teacher is the model itself as it was before training."""
        return bool(MODELS & type(self).model_fields.keys()) and self.reference_path is None

    @property
    def prompts_teacher(self) -> bool:
        """Whether the teacher has its own prompts."""
        return False

    @property
    def completed_share(self) -> float:
        """The share of the prompts that the policy completes; the others are trained on with the data's completions."""
        return getattr(self, "on_policy_fraction", 1.0)

    @property
    def reads_completions(self) -> bool:
        """Whether the method also trains on the data's completions of the prompts."""
        return self.completed_share < 1

    @property
    def joins_completions(self) -> bool:
        """Whether an example has two completions: a pair's, or its own and a mismatched one from another example."""
        return self.kind == "pair"


RefModel = Annotated[
    ModelPath | None,
    Field(description="Hub id or folder of another reference; null: the model itself before training."),
]
Precompute = Annotated[
    bool, Field(description="Compute the reference's log-probabilities before training, and cache them.")
]


class ReferenceMethod(MethodSettings):
    """Base of the methods whose reference may follow the policy."""

    ref_model: RefModel = None
    sync_ref_model: bool = setting(False, "Whether the policy is mixed into the reference at intervals (TR-DPO).")
    ref_model_mixup_alpha: Fraction = setting(0.6, "Share of the policy in the new reference with sync_ref_model.")
    ref_model_sync_steps: Positive = setting(512, "Number of optimizer updates between mixtures with sync_ref_model.")

    def check(self) -> Conflicts:
        yield from super().check()
        if self.sync_ref_model and not self.scores_reference:
            without = "is precomputed" if self.has_reference else "is not read: its weight is 0, or it is left out"
            yield "sync_ref_model", f"mixes the policy into a reference model, but the reference {without}"
        yield from self.unused("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
