"""The settings of each training method. A field that a method does not use does not exist there."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from posttrain.config.base import Float, Int, OneOrMore, Positive, Problems, Settings, Text

PreferenceLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "kto_pair",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
UnpairedLoss = Literal["kto", "bco", "apo_zero_unpaired"]
ContrastiveLoss = Literal["sigmoid", "hinge", "ipo", "simpo"]
PolicyLossType = Literal[
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "no_baseline",
    "reinforce_with_baseline",
    "grpo_clip",
]
KLEstimator = Literal["k1", "k2", "k3"]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

# Losses of the difference chosen - rejected alone: f-divergence scores are defined for these (as in TRL 1.16).
F_DIVERGENCE_LOSSES = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"})
# With reference log-probabilities of 0 these are losses of a difference still; others need the reference's level.
REFERENCE_FREE_LOSSES = F_DIVERGENCE_LOSSES | {"aot", "aot_unpaired"}
LABEL_SMOOTHING_LOSSES = frozenset({"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"})

# What an example is made of: a single sequence, a pair of completions, one completion with a label, or a prompt alone.
Kind = Literal["sft", "pair", "unpaired", "prompt"]


class MethodSettings(Settings):
    """What every method says of itself, beside its settings."""

    kind: ClassVar[Kind] = "pair"
    # The defaults, of full fine-tuning and of LoRA, which takes about ten times more where a likelihood is learnt.
    learning_rates: ClassVar[tuple[float, float]]

    @property
    def joins_completions(self) -> bool:
        """Whether a prompt is scored with two completions at a time: a pair's, or its own and another's."""
        return self.kind == "pair"


class SFTMethod(MethodSettings):
    """Supervised fine-tuning: negative log-likelihood of the target tokens."""

    kind = "sft"
    learning_rates = (2e-5, 2e-4)

    type: Literal["sft"] = Field(default="sft", description="Supervised fine-tuning.")
    completion_only_loss: bool | None = Field(
        default=None,
        description="Train on the completion alone; null: yes where the data has a prompt, else every token.",
    )
    assistant_only_loss: bool = Field(
        default=False, description="Train on every assistant turn of a conversation, on nothing else."
    )

    @model_validator(mode="after")
    def _check(self) -> "SFTMethod":
        problems = Problems()
        problems.check(
            not (self.completion_only_loss and self.assistant_only_loss),
            "assistant_only_loss",
            "is at odds with completion_only_loss: true; the first trains every assistant turn, the second the last",
        )
        problems.report()
        return self


class RewardMethod(MethodSettings):
    """Reward model: Bradley-Terry loss on pairs, scalar head on the last token."""

    learning_rates = (1e-5, 1e-4)

    type: Literal["reward"] = Field(default="reward", description="Reward model.")
    center_rewards_coefficient: Annotated[Float, Field(ge=0)] | None = Field(
        default=None,
        description="Weight of (chosen + rejected)^2, which keeps rewards near 0; 0.01 is usual, null: none.",
    )


class DPOMethod(MethodSettings):
    """Direct preference optimisation and its kin; `type: ipo` is `dpo` with `loss_type: ipo`."""

    learning_rates = (1e-6, 1e-6)

    type: Literal["dpo"] = Field(default="dpo", description="Preference optimisation on pairs: DPO, IPO and kin.")
    loss_type: Annotated[tuple[PreferenceLoss, ...], OneOrMore, Field(min_length=1)] = Field(
        default=("sigmoid",), description="Loss, or a list of losses that are added up."
    )
    loss_weights: tuple[Annotated[Float, Field(ge=0)], ...] | None = Field(
        default=None, description="One weight for each loss of the list; null: 1 each."
    )
    beta: Annotated[Float, Field(gt=0)] = Field(
        default=0.1, description="How strongly the policy is held to the reference; IPO's tau."
    )
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of pairs assumed to be labelled the wrong way round."
    )
    f_divergence_type: Divergence = Field(default="reverse_kl", description="Divergence from the reference (f-DPO).")
    f_alpha_divergence_coef: Float = Field(default=0.5, description="The alpha of alpha_divergence.")
    discopop_tau: Annotated[Float, Field(gt=0)] = Field(default=0.05, description="Temperature of the discopop loss.")
    use_ref_model: bool = Field(
        default=True, description="Compare with a reference; false: its log-probabilities count as 0."
    )
    precompute_ref_log_probs: bool = Field(
        default=False, description="Compute the reference's log-probabilities before training, and cache them."
    )
    ref_model: Text | None = Field(
        default=None, description="Hub id or folder of another reference; null: the model itself before training."
    )

    @model_validator(mode="after")
    def _check(self) -> "DPOMethod":
        problems = Problems()
        losses: set[str] = set(self.loss_type)
        self._check_losses(problems, losses)
        self._check_reference(problems, losses)
        problems.report()
        return self

    def _check_losses(self, problems: Problems, losses: set[str]) -> None:
        weights = self.loss_weights
        problems.check(
            len(losses) == len(self.loss_type),
            "loss_type",
            "names a loss twice; give it a weight in loss_weights instead",
        )
        problems.check(
            weights is None or len(weights) == len(self.loss_type),
            "loss_weights",
            f"has {len(weights or ())} weights for {len(self.loss_type)} losses; give one for each",
        )
        problems.check(weights is None or any(weights), "loss_weights", "are all 0; nothing would be trained")
        problems.check(
            self.label_smoothing == 0 or bool(losses & LABEL_SMOOTHING_LOSSES),
            "label_smoothing",
            f"is read by {names(LABEL_SMOOTHING_LOSSES)} only, not by {names(losses)}; leave it out",
        )
        problems.check(
            self.label_smoothing < 0.5 or "robust" not in losses,
            "label_smoothing",
            f"is {self.label_smoothing}; robust divides by 1 - 2 x label_smoothing and needs less than 0.5",
        )
        problems.check(
            self.label_smoothing > 0 or "exo_pair" not in losses,
            "label_smoothing",
            "is 0; exo_pair takes its logarithm and needs more than 0 (the paper uses 0.001)",
        )
        problems.check(
            self.discopop_tau == 0.05 or "discopop" in losses,
            "discopop_tau",
            f"is read by discopop only, not by {names(losses)}; leave it out",
        )
        problems.check(
            self.f_divergence_type == "reverse_kl" or losses <= F_DIVERGENCE_LOSSES,
            "f_divergence_type",
            f"other than reverse_kl is defined for {names(F_DIVERGENCE_LOSSES)}, not for "
            f"{names(losses - F_DIVERGENCE_LOSSES)}",
        )
        problems.check(
            self.f_alpha_divergence_coef == 0.5 or self.f_divergence_type == "alpha_divergence",
            "f_alpha_divergence_coef",
            f"is read by f_divergence_type: alpha_divergence only, not by {self.f_divergence_type}; leave it out",
        )

    def _check_reference(self, problems: Problems, losses: set[str]) -> None:
        if self.use_ref_model:
            return
        needing = losses - REFERENCE_FREE_LOSSES
        problems.check(not needing, "use_ref_model", f"is false, but {names(needing)} cannot do without a reference")
        problems.check(
            not self.precompute_ref_log_probs,
            "precompute_ref_log_probs",
            "is true, but with use_ref_model: false there is no reference to compute",
        )
        problems.check(self.ref_model is None, "ref_model", "names a reference, but use_ref_model is false")
        problems.check(
            self.f_divergence_type == "reverse_kl",
            "f_divergence_type",
            "measures the divergence from a reference, but use_ref_model is false",
        )


class ORPOMethod(MethodSettings):
    """Odds ratio preference optimisation: likelihood of the chosen completion and an odds ratio, no reference."""

    learning_rates = (8e-6, 8e-5)

    type: Literal["orpo"] = Field(default="orpo", description="Odds ratio preference optimisation, no reference.")
    beta: Annotated[Float, Field(gt=0)] = Field(
        default=0.1, description="Weight of the odds ratio against the likelihood; the paper's lambda."
    )
    completion_only_loss: bool = Field(
        default=False, description="Take the likelihood of the chosen completion alone; false: of its prompt too."
    )


class CPOMethod(MethodSettings):
    """Contrastive preference optimisation: DPO with a uniform reference, and the likelihood of the chosen reply."""

    learning_rates = (8e-6, 8e-5)

    type: Literal["cpo"] = Field(default="cpo", description="Contrastive preference optimisation, no reference.")
    loss_type: ContrastiveLoss = Field(default="sigmoid", description="How chosen and rejected are compared.")
    beta: Annotated[Float, Field(gt=0)] = Field(default=0.1, description="Scale of the comparison; IPO's tau.")
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of pairs assumed to be labelled the wrong way round."
    )
    cpo_alpha: Annotated[Float, Field(ge=0)] = Field(
        default=1.0, description="Weight of the chosen completion's negative log-likelihood per token."
    )
    simpo_gamma: Annotated[Float, Field(ge=0)] = Field(default=0.5, description="Margin of loss_type: simpo.")
    alpha: Float = Field(default=0.0, description="AlphaPO's reward shape (1 - p^-alpha) / alpha; 0: log p.")

    @model_validator(mode="after")
    def _check(self) -> "CPOMethod":
        problems = Problems()
        problems.check(
            self.label_smoothing == 0 or self.loss_type in ("sigmoid", "simpo"),
            "label_smoothing",
            f"is read by sigmoid and simpo only, not by {self.loss_type}; leave it out",
        )
        problems.check(
            self.simpo_gamma == 0.5 or self.loss_type == "simpo",
            "simpo_gamma",
            f"is read by loss_type: simpo only, not by {self.loss_type}; leave it out",
        )
        problems.report()
        return self


class SimPOMethod(MethodSettings):
    """Simple preference optimisation: log-probabilities per token as rewards, with a margin; no reference."""

    learning_rates = (1e-6, 1e-6)

    type: Literal["simpo"] = Field(default="simpo", description="Simple preference optimisation, no reference.")
    beta: Annotated[Float, Field(gt=0)] = Field(
        default=2.0, description="Scale of the rewards, which are log-probabilities per token."
    )
    simpo_gamma: Annotated[Float, Field(ge=0)] = Field(
        default=1.0, description="By how much the chosen reward should be ahead; about half of beta."
    )
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of pairs assumed to be labelled the wrong way round."
    )
    cpo_alpha: Annotated[Float, Field(ge=0)] = Field(
        default=0.0, description="Weight of the chosen completion's negative log-likelihood per token (CPO-SimPO)."
    )
    alpha: Float = Field(default=0.0, description="AlphaPO's reward shape (1 - p^-alpha) / alpha; 0: log p.")


class KTOMethod(MethodSettings):
    """Kahneman-Tversky optimisation: single completions that are labelled desirable or undesirable."""

    kind = "unpaired"
    learning_rates = (1e-6, 1e-6)

    type: Literal["kto"] = Field(default="kto", description="Single completions labelled desirable or undesirable.")
    loss_type: UnpairedLoss = Field(default="kto", description="What a completion's reward is held against.")
    beta: Annotated[Float, Field(gt=0)] = Field(
        default=0.1, description="How strongly the policy is held to the reference."
    )
    desirable_weight: Annotated[Float, Field(ge=0)] = Field(
        default=1.0, description="Weight of desirable completions, to make up for classes of unequal size."
    )
    undesirable_weight: Annotated[Float, Field(ge=0)] = Field(
        default=1.0, description="Weight of undesirable completions."
    )
    precompute_ref_log_probs: bool = Field(
        default=False, description="Compute the reference's log-probabilities before training, and cache them."
    )
    ref_model: Text | None = Field(
        default=None, description="Hub id or folder of another reference; null: the model itself before training."
    )

    @property
    def joins_completions(self) -> bool:
        return self.loss_type == "kto"  # its KL is estimated from the completions of other examples

    @model_validator(mode="after")
    def _check(self) -> "KTOMethod":
        problems = Problems()
        problems.check(
            self.desirable_weight + self.undesirable_weight > 0,
            "desirable_weight",
            "and undesirable_weight are both 0; nothing would be trained",
        )
        problems.report()
        return self


class OnlineMethod(MethodSettings):
    """What methods share that learn from completions of the policy itself, drawn and rewarded at every step."""

    kind = "prompt"

    num_generations: Positive = Field(default=8, description="Completions of each prompt.")
    num_minibatches: Positive = Field(
        default=1, description="Parts that a step's prompts are divided into, each with an update of its own."
    )
    kl_estimator: KLEstimator = Field(default="k3", description="Estimate of the KL to the reference.")
    entropy_coef: Annotated[Float, Field(ge=0)] = Field(
        default=0.0, description="Weight of the entropy that is added to the objective."
    )
    mask_truncated_completions: bool = Field(
        default=False, description="Leave completions that reached the length limit out of the loss."
    )
    importance_sampling_cap: Annotated[Float, Field(gt=0)] | None = Field(
        default=3.0,
        description="Tokens are weighed by trainer's over engine's probability, up to this; null: not at all.",
    )
    ref_model: Text | None = Field(
        default=None, description="Hub id or folder of another reference; null: the model itself before training."
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to a reference has a weight."""
        raise NotImplementedError

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        raise NotImplementedError


class PolicyGradientMethod(OnlineMethod):
    """What GRPO, RLOO and REINFORCE++ share: rewards become advantages without a value model."""

    learning_rates = (1e-6, 1e-5)

    num_iterations: Positive = Field(default=1, description="How often a step's completions are trained on.")
    beta: Annotated[Float, Field(ge=0)] = Field(
        default=0.05, description="Weight of the KL to the reference; 0: there is no reference."
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Whether the KL is a term of the loss or taken off the reward."
    )
    epsilon: Annotated[Float, Field(gt=0)] = Field(
        default=0.2, description="How far a ratio to the old policy may go below and above 1 before it is clipped."
    )
    epsilon_high: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, description="The same above 1 (clip-higher); of cispo the ratio's bound itself; null: epsilon."
    )
    resampling_rounds: Annotated[Int, Field(ge=0)] = Field(
        default=0, description="Groups of equal rewards, which teach nothing, are drawn again up to so many times."
    )

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def updates(self) -> int:
        return self.num_iterations * self.num_minibatches

    def _check_groups(self, problems: Problems, compares: bool, what: str) -> None:
        problems.check(
            not compares or self.num_generations > 1,
            "num_generations",
            f"is 1, but {what} compares a prompt's completions with one another; give 2 or more",
        )
        problems.check(
            self.resampling_rounds == 0 or self.num_generations > 1,
            "resampling_rounds",
            "draws groups of equal rewards again, and a group of 1 has always equal rewards; leave it out",
        )
        problems.check(
            self.ref_model is None or self.beta > 0, "ref_model", "names a reference, but beta is 0: nothing reads it"
        )
        problems.check(
            self.beta > 0 or self.kl_in == type(self).model_fields["kl_in"].default,
            "kl_in",
            "is read with beta above 0 only, not with 0; leave it out",
        )


class GRPOMethod(PolicyGradientMethod):
    """Group relative policy optimisation: a completion is compared with the others of its prompt."""

    type: Literal["grpo"] = Field(default="grpo", description="Group relative policy optimisation.")
    loss_type: PolicyLossType = Field(default="grpo", description="How tokens become a loss.")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="What advantages are divided by: the group's or the step's spread, or nothing."
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        default=None, description="What has one ratio to the old policy; null: the loss's own, sequence for gspo."
    )

    @model_validator(mode="after")
    def _check(self) -> "GRPOMethod":
        problems = Problems()
        raw = self.loss_type == "no_baseline"
        plain = raw or self.loss_type == "reinforce_with_baseline"
        self._check_groups(problems, not raw, f"loss_type: {self.loss_type}")
        problems.check(
            not raw or self.scale_rewards == "group", "scale_rewards", "is not read by no_baseline; leave it out"
        )
        problems.check(
            self.importance_sampling_level is None or not plain,
            "importance_sampling_level",
            f"is not read by {self.loss_type}, which has no ratios; leave it out",
        )
        problems.check(
            self.importance_sampling_level != "sequence" or self.loss_type != "cispo",
            "importance_sampling_level",
            "is sequence, but cispo weighs each token by its own ratio",
        )
        problems.check(
            self.importance_sampling_level != "token" or self.loss_type != "gspo",
            "importance_sampling_level",
            "is token, but gspo is the loss with one ratio a sequence; loss_type: grpo has one a token",
        )
        problems.check(
            not plain or self.updates == 1,
            "num_minibatches" if self.num_minibatches > 1 else "num_iterations",
            f"gives a step {self.updates} updates, but {self.loss_type} has no ratio that would correct for the "
            "policy's moves between them; give 1, or another loss_type",
        )
        problems.report()
        return self


class RLOOMethod(PolicyGradientMethod):
    """REINFORCE leave-one-out: a completion is compared with the mean of the others of its prompt."""

    type: Literal["rloo"] = Field(default="rloo", description="REINFORCE leave-one-out.")
    kl_estimator: KLEstimator = Field(default="k1", description="Estimate of the KL to the reference.")
    kl_in: Literal["loss", "reward"] = Field(
        default="reward", description="Whether the KL is a term of the loss or taken off the reward."
    )

    @model_validator(mode="after")
    def _check(self) -> "RLOOMethod":
        problems = Problems()
        self._check_groups(problems, True, "rloo")
        problems.report()
        return self


class ReinforcePlusPlusMethod(PolicyGradientMethod):
    """REINFORCE++: each token's return, normalised over the whole step; no groups, no value model."""

    type: Literal["reinforce_plus_plus"] = Field(
        default="reinforce_plus_plus", description="REINFORCE with returns normalised over the step."
    )
    num_generations: Positive = Field(default=1, description="Completions of each prompt.")
    kl_estimator: KLEstimator = Field(default="k1", description="Estimate of the KL to the reference.")
    kl_in: Literal["loss", "reward"] = Field(
        default="reward", description="Whether the KL is a term of the loss or taken off the reward."
    )

    @model_validator(mode="after")
    def _check(self) -> "ReinforcePlusPlusMethod":
        problems = Problems()
        self._check_groups(problems, False, "")
        problems.report()
        return self


class PPOMethod(OnlineMethod):
    """Proximal policy optimisation: a value head says what was to be expected before each token."""

    learning_rates = (3e-6, 3e-5)

    type: Literal["ppo"] = Field(default="ppo", description="Proximal policy optimisation with a value head.")
    num_generations: Positive = Field(default=1, description="Completions of each prompt.")
    num_ppo_epochs: Positive = Field(default=4, description="How often a step's completions are trained on.")
    cliprange: Annotated[Float, Field(gt=0)] = Field(
        default=0.2, description="How far a ratio to the old policy may go from 1 before it is clipped."
    )
    cliprange_value: Annotated[Float, Field(gt=0)] = Field(
        default=0.2, description="How far a value may go from the old one before it is clipped."
    )
    vf_coef: Annotated[Float, Field(gt=0)] = Field(default=0.1, description="Weight of the value loss.")
    gamma: Annotated[Float, Field(gt=0, le=1)] = Field(default=1.0, description="Discount of later rewards, per token.")
    lam: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.95, description="GAE's lambda: 0 trusts the values, 1 the rewards."
    )
    kl_coef: Annotated[Float, Field(ge=0)] = Field(
        default=0.05, description="Weight of each token's KL to the reference in its reward; 0: no reference."
    )
    kl_estimator: KLEstimator = Field(default="k1", description="Estimate of the KL to the reference.")
    target_kl: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, description="kl_coef follows this KL, in nats a completion; null: it stays as it is."
    )
    kl_horizon: Positive = Field(
        default=10_000, description="Completions over which kl_coef follows target_kl; fewer: faster."
    )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def updates(self) -> int:
        return self.num_ppo_epochs * self.num_minibatches

    @model_validator(mode="after")
    def _check(self) -> "PPOMethod":
        problems = Problems()
        problems.check(
            self.target_kl is None or self.kl_coef > 0,
            "target_kl",
            "needs a kl_coef above 0 to begin with: it is multiplied, and 0 stays 0",
        )
        problems.check(
            self.kl_horizon == 10_000 or self.target_kl is not None,
            "kl_horizon",
            "is read with target_kl only; leave it out",
        )
        problems.check(
            self.ref_model is None or self.kl_coef > 0,
            "ref_model",
            "names a reference, but kl_coef is 0: nothing reads it",
        )
        problems.report()
        return self


def names(values: set[str] | frozenset[str]) -> str:
    """The values in alphabetical order, for a message."""
    return ", ".join(sorted(values))


def spell_out(method: Any) -> Any:
    """`ipo` is `dpo` with `loss_type: [ipo]`, and a bare name is a method with its defaults; the rest as it is."""
    if isinstance(method, str):
        method = {"type": method}
    if isinstance(method, dict) and method.get("type") == "ipo":
        method = {**method, "type": "dpo", "loss_type": method.get("loss_type", ["ipo"])}
    if isinstance(method, dict) and method.get("type") == "ppo":
        method = {PPO_NAMES.get(key, key): value for key, value in method.items()}
    return method


# What PPO calls otherwise, so that the names that aliases come to (posttrain/config/layers.py) are its own too.
PPO_NAMES = {"beta": "kl_coef", "epsilon": "cliprange", "num_iterations": "num_ppo_epochs"}

AnyMethod = (
    SFTMethod
    | RewardMethod
    | DPOMethod
    | ORPOMethod
    | CPOMethod
    | SimPOMethod
    | KTOMethod
    | PPOMethod
    | GRPOMethod
    | RLOOMethod
    | ReinforcePlusPlusMethod
)
METHODS: dict[str, type[AnyMethod]] = {
    "sft": SFTMethod,
    "reward": RewardMethod,
    "dpo": DPOMethod,
    "orpo": ORPOMethod,
    "cpo": CPOMethod,
    "simpo": SimPOMethod,
    "kto": KTOMethod,
    "ppo": PPOMethod,
    "grpo": GRPOMethod,
    "rloo": RLOOMethod,
    "reinforce_plus_plus": ReinforcePlusPlusMethod,
}
METHOD_NAMES = (*METHODS, "ipo")
Method = Annotated[Annotated[AnyMethod, Field(discriminator="type")], BeforeValidator(spell_out)]
