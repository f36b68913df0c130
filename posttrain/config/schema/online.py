"""The settings of the methods that learn from their own completions: GRPO and its variants, PPO."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from posttrain.config.schema.base import Conflicts, MethodSettings, ReferenceMethod, Settings, setting
from posttrain.config.schema.rollout import Curriculum
from posttrain.config.schema.types import AboveZero, Fraction, Natural, NonNegative, OrOwn, Positive, ZeroToOne, is_own

PolicyLossType = Literal[
    "grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo",
    "no_baseline", "reinforce_with_baseline", "grpo_clip",
]  # fmt: skip
RATIO_LOSSES = frozenset(get_args(PolicyLossType)) - {"no_baseline", "reinforce_with_baseline"}
CLIPPED_LOSSES = RATIO_LOSSES - {"sapo", "vespo"}
BASELINE_LOSSES = frozenset(get_args(PolicyLossType)) - {"no_baseline"}
KLEstimator = Annotated[Literal["k1", "k2", "k3"], Field(description="Estimator of the KL to the reference.")]
KLUse = Annotated[
    Literal["loss", "reward"], Field(description="Use of the KL: as a term of the loss, or as a penalty on the reward.")
]
# Settings with another name in PPO, so that aliases (posttrain/config/reading/layers.py) resolve to its names.
PPO_NAMES = {"beta": "kl_coef", "epsilon": "cliprange", "num_iterations": "num_ppo_epochs"}


class OnlineMethod(MethodSettings):
    """Base of the methods that train on completions sampled from the policy at every step."""

    kind = "prompt"
    warmup_from_zero = False
    samples_completions = True
    example = ("Qwen/Qwen3-0.6B", "gsm8k")

    num_generations: Positive = setting(8, "Number of completions per prompt.")
    mask_truncated_completions: bool = setting(
        False, "Whether to exclude completions that reached the length limit from the loss."
    )

    @model_validator(mode="before")
    @classmethod
    def _former(cls, values: Any) -> Any:
        """Accept what runs of earlier versions saved: `jensen_shannon`, and `importance_sampling_cap`."""
        if isinstance(values, dict) and values.get("divergence") == "jensen_shannon":
            values = values | {"divergence": "jsd"}
        if isinstance(values, dict) and "importance_sampling_cap" in values:
            values = {"importance_sampling": {"clip_max": values["importance_sampling_cap"]}} | values
            if values.pop("importance_sampling_cap") is None:
                values["importance_sampling"] = None
        return values


class ImportanceSampling(Settings):
    """Weights pi_trainer / pi_engine of the loss, which correct for what the engine computes differently."""

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"] = setting(
        "token_truncate", "Ratio (of a token, completion, or its mean), and what happens outside the bounds."
    )
    clip_max: AboveZero | None = setting(3.0, "Upper bound of the ratio; null: none.")
    clip_min: AboveZero | None = setting(None, "Lower bound of the ratio; null: none.")

    def check(self) -> Conflicts:
        if self.clip_max is None and self.clip_min is None:
            yield "clip_max", "and clip_min are both null; give one, or importance_sampling: null for no weights"
        if self.clip_max is not None and self.clip_min is not None and self.clip_min >= self.clip_max:
            yield "clip_min", f"is {self.clip_min}, not below clip_max, {self.clip_max}"


class RewardedMethod(ReferenceMethod, OnlineMethod):
    """Base of the methods that learn from rewards of their completions."""

    needs_rewards = True
    starts_as_reference = True
    has_ratio = True

    num_minibatches: Positive = setting(
        1, "Number of minibatches that a step's prompts are split into, each with its own update."
    )
    kl_estimator: KLEstimator = "k3"
    entropy_coef: NonNegative = setting(0.0, "Weight of the entropy bonus in the objective.")
    importance_sampling: ImportanceSampling | None = setting(
        ImportanceSampling(), "Weights pi_trainer / pi_engine of the loss; null: none."
    )
    curriculum: Curriculum | None = setting(None, "Rest for prompts that are too easy or too hard; null: none rests.")

    def check(self) -> Conflicts:
        yield from super().check()
        if not self.has_reference and not self.is_default("kl_estimator"):
            yield "kl_estimator", "applies to the KL to a reference, whose weight is 0; leave it out"
        if not self.has_reference and self.ref_model is not None:
            yield "ref_model", "names a reference, but the weight of the KL to it is 0: nothing reads it"


class PolicyGradientMethod(RewardedMethod):
    """Base of GRPO, RLOO and REINFORCE++: advantages from rewards, without a value model."""

    learning_rates = (1e-6, 1e-5)

    num_iterations: Positive = setting(1, "Number of passes over a step's completions.")
    beta: NonNegative = setting(0.05, "Weight of the KL to the reference; 0: no reference.")
    kl_in: KLUse = "loss"
    epsilon: AboveZero = setting(0.2, "Clip range of the ratio to the old policy, below and above 1.")
    epsilon_high: AboveZero | None = setting(
        None, "Clip range above 1 (clip-higher); cispo: cap of the ratio itself; null: epsilon."
    )
    advantage_level: Literal["trajectory", "turn"] = setting(
        "trajectory",
        "What is compared with the group: the reward of a whole episode, or what each turn and later ones earn.",
    )
    resampling_rounds: Natural = setting(0, "Maximum number of times to resample groups whose rewards are all equal.")

    @property
    def has_reference(self) -> bool:
        return self.beta > 0

    @property
    def updates(self) -> int:
        return self.num_iterations * self.num_minibatches

    @property
    def compares_groups(self) -> bool:
        return True

    def check(self) -> Conflicts:
        name = self.name() if self.loss_setting is None else f"{self.loss_setting}: {self.loss_name}"
        if self.compares_groups and self.num_generations <= 1:
            yield "num_generations", f"is 1, but {name} compares a prompt's completions; give 2 or more"
        if self.resampling_rounds != 0 and self.num_generations <= 1:
            yield "resampling_rounds", "resamples groups of equal rewards, which a group of 1 always has; leave it out"
        if self.beta <= 0 and not self.is_default("kl_in"):
            yield "kl_in", "has no effect while beta is 0; leave it out"
        yield from super().check()


class GRPOMethod(PolicyGradientMethod):
    """Group relative policy optimisation: each completion is compared with the other completions of its prompt."""

    loss_setting = "loss_type"
    read_by = (
        ("epsilon", CLIPPED_LOSSES),
        ("epsilon_high", CLIPPED_LOSSES),
        ("delta", CLIPPED_LOSSES - {"cispo"}),
        ("importance_sampling_level", RATIO_LOSSES),
        *((name, BASELINE_LOSSES) for name in ("scale_rewards", "multi_objective_aggregation")),
        *((f"sapo_temperature_{sign}", frozenset({"sapo"})) for sign in ("pos", "neg")),
        *((f"vespo_{name}_{sign}", frozenset({"vespo"})) for name in ("k", "lambda") for sign in ("pos", "neg")),
    )

    type: Literal["grpo"] = setting("grpo", "Group relative policy optimisation.")
    loss_type: OrOwn[PolicyLossType] = setting("grpo", "Policy-gradient loss and its average, or module:function.")
    scale_rewards: Literal["group", "batch", "none"] = setting(
        "group", "Standard deviation that divides advantages: the group's, the step's (batch), or none."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = setting(
        "sum_then_normalize", "Whether rewards are summed and then compared, or each is normalised first (GDPO)."
    )
    importance_sampling_level: Literal["token", "sequence"] | None = setting(
        None, "Level of the ratio to the old policy; null: sequence for gspo and luspo, token for others."
    )
    delta: AboveZero | None = setting(
        None, "Upper bound of the ratio where the advantage is negative (two-sided clip); null: none."
    )
    sapo_temperature_pos: AboveZero = setting(1.0, "Temperature of sapo's gate for advantages above 0.")
    sapo_temperature_neg: AboveZero = setting(1.05, "Temperature of sapo's gate for other advantages.")
    vespo_k_pos: NonNegative = setting(2.0, "Power of vespo's weight for advantages of at least 0.")
    vespo_lambda_pos: NonNegative = setting(3.0, "Decay of vespo's weight for advantages of at least 0.")
    vespo_k_neg: NonNegative = setting(3.0, "Power of vespo's weight for negative advantages.")
    vespo_lambda_neg: NonNegative = setting(2.0, "Decay of vespo's weight for negative advantages.")
    off_policy_mask_threshold: AboveZero | None = setting(
        None, "Drift in nats per token above which bad completions leave the loss; null: none do."
    )
    top_entropy_quantile: Fraction = setting(
        1.0, "Share of tokens, those with the highest entropy, that the policy loss covers."
    )
    use_bias_correction_kl: bool = setting(
        False, "Whether the KL in the loss is multiplied by the ratio, so that its gradient is unbiased."
    )
    use_adaptive_entropy: bool = setting(
        False, "Whether entropy_coef changes by entropy_coef_delta a step, up while entropy is below entropy_target."
    )
    entropy_coef_min: NonNegative = setting(0.0, "Lower bound of entropy_coef with use_adaptive_entropy.")
    entropy_coef_max: NonNegative = setting(1.0, "Upper bound of entropy_coef with use_adaptive_entropy.")
    entropy_coef_delta: AboveZero = setting(0.005, "Change of entropy_coef per step with use_adaptive_entropy.")
    entropy_target: AboveZero = setting(0.2, "Entropy in nats per token at which the bonus begins to act.")
    num_trees: Positive | None = setting(
        None, "Number of a prompt's episodes that begin anew; the others branch from turns of these; null: all."
    )
    tree_rounds: Positive = setting(
        1, "Number of rounds in which the branches of a tree begin; later ones may branch again."
    )

    @property
    def compares_groups(self) -> bool:
        return self.loss_type != "no_baseline"

    @property
    def clips(self) -> bool:
        return self.loss_type in CLIPPED_LOSSES or is_own(self.loss_type)

    def _check_trees(self) -> Conflicts:
        yield from self.unused("num_trees", "tree_rounds")
        if self.num_trees is None:
            return
        branches = (self.num_generations - self.num_trees) // self.num_trees
        if branches < self.tree_rounds:
            yield (
                "num_trees",
                f"is {self.num_trees} of {self.num_generations} completions per prompt (num_generations), so there are "
                f"fewer than {self.tree_rounds} branches per tree (tree_rounds)",
            )
        if self.advantage_level == "turn":
            yield "num_trees", "cannot be combined with advantage_level: turn"
        if not self.compares_groups:
            yield "num_trees", "is not read by no_baseline, which compares nothing; leave it out"

    @classmethod
    def losses(cls, run: MethodSettings) -> list[tuple[str, dict[str, Any]]]:
        """Every loss (grpo_clip only if the run uses it), then the run's loss with other values of scale_rewards."""
        made = [(loss, chosen) for loss, chosen in super().losses(run) if loss != "grpo_clip" or loss == run.loss_name]
        own = run.loss_type if isinstance(run, GRPOMethod) and run.loss_type != "no_baseline" else "grpo"
        scales = [scale for scale in ("group", "batch", "none") if scale != getattr(run, "scale_rewards", "group")]
        return [*made, *((own, {"loss_type": own, "scale_rewards": scale}) for scale in scales)]

    def check(self) -> Conflicts:
        yield from super().check()
        yield from self._check_trees()
        bounds = ("entropy_coef_min", "entropy_coef_max")
        yield from self.unused("use_adaptive_entropy", *bounds, "entropy_coef_delta", "entropy_target")
        if self.use_adaptive_entropy and not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            yield "entropy_coef", f"is {self.entropy_coef}, outside {' and '.join(bounds)}"
        for name in ("scale_rewards", "kl_in", "advantage_level", "num_trees", "resampling_rounds"):
            if self.multi_objective_aggregation == "normalize_then_sum" and not self.is_default(name):
                yield name, "is for sums of rewards, but normalize_then_sum compares each reward alone; leave it out"
        if self.loss_type == "cispo" and self.epsilon_high is not None and not self.is_default("epsilon"):
            yield "epsilon", "is not read by cispo with epsilon_high, which caps the ratio; leave it out"
        if self.importance_sampling_level == "sequence" and self.loss_type in ("cispo", "vespo"):
            yield "importance_sampling_level", f"is sequence, but {self.loss_type} has a weight for each token"
        if self.importance_sampling_level == "token" and self.loss_type == "gspo":
            yield "importance_sampling_level", "is token, but gspo has one ratio per sequence; grpo has one per token"
        if self.delta is not None and self.delta <= 1 + (self.epsilon_high or self.epsilon):
            yield ("delta", f"is {self.delta}; it bounds ratios beyond the clip range: give more than 1 + epsilon_high")
        if self.use_bias_correction_kl and (self.beta <= 0 or self.kl_in == "reward"):
            yield "use_bias_correction_kl", "changes the KL as a term of the loss, which this run does not have"
        level = "" if self.importance_sampling is None else self.importance_sampling.mode.partition("_")[0]
        if self.loss_type == "vespo" and level not in ("", "token"):
            yield "importance_sampling", "of a completion is not read by vespo; give mode: token_truncate or token_mask"
        if self.loss_type in get_args(PolicyLossType) and self.loss_type not in RATIO_LOSSES and self.updates != 1:
            yield (
                "num_minibatches" if self.num_minibatches > 1 else "num_iterations",
                f"gives a step {self.updates} updates, but {self.loss_type} has no ratio that would correct for the "
                "changes of the policy between them; give 1, or another loss_type",
            )


class RLOOMethod(PolicyGradientMethod):
    """REINFORCE leave-one-out: the baseline is the mean reward of the prompt's other completions."""

    type: Literal["rloo"] = setting("rloo", "REINFORCE leave-one-out.")
    kl_estimator: KLEstimator = "k1"
    kl_in: KLUse = "reward"


class ReinforcePlusPlusMethod(PolicyGradientMethod):
    """REINFORCE++: each token's return is normalised over the whole step, without groups or a value model."""

    type: Literal["reinforce_plus_plus"] = setting(
        "reinforce_plus_plus", "REINFORCE with returns normalised over the step."
    )
    num_generations: Positive = setting(1, "Number of completions per prompt.")
    kl_estimator: KLEstimator = "k1"
    kl_in: KLUse = "reward"

    @property
    def compares_groups(self) -> bool:
        return False

    def check(self) -> Conflicts:
        yield from super().check()
        if not self.is_default("advantage_level"):
            yield "advantage_level", "is not read by reinforce_plus_plus, whose tokens have returns; leave it out"


class PPOMethod(RewardedMethod):
    """Proximal policy optimisation: a value head predicts the return at each token."""

    learning_rates = (3e-6, 3e-5)
    trains_values = True
    own_names = PPO_NAMES

    type: Literal["ppo"] = setting("ppo", "Proximal policy optimisation with a value head.")
    num_generations: Positive = setting(1, "Number of completions per prompt.")
    num_minibatches: Positive = setting(
        2, "Number of minibatches that a step's prompts are split into, each with its own update."
    )
    num_ppo_epochs: Positive = setting(4, "Number of passes over a step's completions.")
    cliprange: AboveZero = setting(0.2, "Clip range, around 1, of the ratio to the old policy.")
    cliprange_value: AboveZero = setting(0.2, "Clip range of the value head's output around its old output.")
    vf_coef: AboveZero = setting(1.0, "Weight of the value loss.")
    normalize_returns: bool = setting(
        True, "Whether the value head predicts returns normalised by their running mean and spread."
    )
    whiten_rewards: bool = setting(
        False, "Whether to scale a step's token rewards to a standard deviation of 1 and keep their mean."
    )
    gamma: Fraction = setting(1.0, "Discount factor per token.")
    lam: ZeroToOne = setting(0.95, "GAE's lambda: 0 relies on the values, 1 on the rewards.")
    kl_coef: NonNegative = setting(0.05, "Weight of the KL to the reference in each token's reward; 0: no reference.")
    kl_estimator: KLEstimator = "k1"
    target_kl: AboveZero | None = setting(
        None, "Target KL that kl_coef adapts to, in nats per completion; null: kl_coef is fixed."
    )
    kl_horizon: Positive = setting(
        10_000, "Number of completions over which kl_coef adapts to target_kl; fewer: faster."
    )

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def updates(self) -> int:
        return self.num_ppo_epochs * self.num_minibatches

    def check(self) -> Conflicts:
        if self.target_kl is not None and self.kl_coef <= 0:
            yield "target_kl", "needs a kl_coef above 0: kl_coef adapts by factors, so 0 would never change"
        yield from self.unused("target_kl", "kl_horizon")
        yield from super().check()
