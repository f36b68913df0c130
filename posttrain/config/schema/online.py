"""The settings of the methods that learn from their own completions: GRPO and its variants, PPO, distillation."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.schema.base import Float, Int, MethodSettings, ModelPath, Positive, Problems, RefModel, Share

PolicyLossType = Literal[
    "grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "no_baseline", "reinforce_with_baseline", "grpo_clip"
]
PLAIN_LOSSES = frozenset({"no_baseline", "reinforce_with_baseline"})  # losses without the ratio to the old policy
KLEstimator = Literal["k1", "k2", "k3"]
# Settings with another name in PPO, so that aliases (posttrain/config/reading/layers.py) resolve to its names.
PPO_NAMES = {"beta": "kl_coef", "epsilon": "cliprange", "num_iterations": "num_ppo_epochs"}


class OnlineMethod(MethodSettings):
    """Base of the methods that train on completions sampled from the policy at every step."""

    kind = "prompt"
    warmup_from_zero = False
    samples_completions = True
    example = ("Qwen/Qwen3-0.6B", "gsm8k")

    num_generations: Positive = Field(default=8, description="Number of completions per prompt.")
    mask_truncated_completions: bool = Field(
        default=False, description="Whether to exclude completions that reached the length limit from the loss."
    )

    @property
    def completions_per_prompt(self) -> int:
        return self.num_generations


class RewardedMethod(OnlineMethod):
    """Base of the methods that learn from rewards of their completions."""

    needs_rewards = True
    starts_as_reference = True
    has_ratio = True

    num_minibatches: Positive = Field(
        default=1, description="Number of minibatches that a step's prompts are split into, each with its own update."
    )
    kl_estimator: KLEstimator = Field(default="k3", description="Estimator of the KL to the reference.")
    entropy_coef: Annotated[Float, Field(ge=0)] = Field(
        default=0.0, description="Weight of the entropy bonus in the objective."
    )
    importance_sampling_cap: Annotated[Float, Field(gt=0)] | None = Field(
        default=3.0, description="Cap of the importance weight pi_trainer / pi_engine of each token; null: no weights."
    )
    ref_model: RefModel = None

    def check(self, problems: Problems) -> None:
        if not self.has_reference and not self.is_default("kl_estimator"):
            problems.add("kl_estimator", "applies to the KL to a reference, whose weight is 0; leave it out")


class PolicyGradientMethod(RewardedMethod):
    """Base of GRPO, RLOO and REINFORCE++: advantages from rewards, without a value model."""

    learning_rates = (1e-6, 1e-5)

    num_iterations: Positive = Field(default=1, description="Number of passes over a step's completions.")
    beta: Annotated[Float, Field(ge=0)] = Field(
        default=0.05, description="Weight of the KL to the reference; 0: no reference."
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Use of the KL: as a term of the loss, or as a penalty on the reward."
    )
    epsilon: Annotated[Float, Field(gt=0)] = Field(
        default=0.2, description="Clip range of the ratio to the old policy, below and above 1."
    )
    epsilon_high: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, description="Clip range above 1 (clip-higher); cispo: cap of the ratio itself; null: epsilon."
    )
    advantage_level: Literal["trajectory", "turn"] = Field(
        default="trajectory",
        description="What is compared with the group: the reward of a whole episode, or what each turn and later ones "
        "earn.",
    )
    resampling_rounds: Annotated[Int, Field(ge=0)] = Field(
        default=0, description="Maximum number of times to resample groups whose rewards are all equal."
    )

    @property
    def has_reference(self) -> bool:
        return self.beta > 0

    @property
    def updates(self) -> int:
        return self.num_iterations * self.num_minibatches

    @property
    def compares_groups(self) -> bool:
        return True

    def check(self, problems: Problems) -> None:
        name = self.name() if self.loss_setting is None else f"{self.loss_setting}: {self.loss_name}"
        if self.compares_groups and self.num_generations <= 1:
            problems.add(
                "num_generations", f"is 1, but {name} compares a prompt's completions with one another; give 2 or more"
            )
        if self.resampling_rounds != 0 and self.num_generations <= 1:
            problems.add(
                "resampling_rounds",
                "resamples groups of equal rewards, but a group of 1 always has equal rewards; leave it out",
            )
        if self.ref_model is not None and self.beta <= 0:
            problems.add("ref_model", "names a reference, but beta is 0: nothing reads it")
        if self.beta <= 0 and not self.is_default("kl_in"):
            problems.add("kl_in", "has no effect while beta is 0; leave it out")
        super().check(problems)


class GRPOMethod(PolicyGradientMethod):
    """Group relative policy optimisation: each completion is compared with the other completions of its prompt."""

    loss_setting = "loss_type"

    type: Literal["grpo"] = Field(default="grpo", description="Group relative policy optimisation.")
    loss_type: PolicyLossType = Field(default="grpo", description="Policy-gradient loss and its normalisation.")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="Standard deviation that divides advantages: the group's, the step's (batch), or none.",
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        default=None, description="Level of the ratio to the old policy; null: sequence for gspo, token for others."
    )
    num_trees: Positive | None = Field(
        default=None,
        description="Number of a prompt's episodes that begin anew; the others branch from turns of these; null: all.",
    )
    tree_rounds: Positive = Field(
        default=1, description="Number of rounds in which the branches of a tree begin; later ones may branch again."
    )

    @property
    def compares_groups(self) -> bool:
        return self.loss_type != "no_baseline"

    @property
    def clips(self) -> bool:
        return self.loss_type not in PLAIN_LOSSES

    def _check_trees(self, problems: Problems) -> None:
        if self.num_trees is None:
            if self.tree_rounds != 1:
                problems.add("tree_rounds", "has no effect without num_trees; leave it out")
            return
        branches = (self.num_generations - self.num_trees) // self.num_trees
        if branches < self.tree_rounds:
            problems.add(
                "num_trees",
                f"is {self.num_trees} of {self.num_generations} completions per prompt "
                f"(num_generations), so there are fewer than {self.tree_rounds} branches per tree (tree_rounds)",
            )
        if self.advantage_level == "turn":
            problems.add("num_trees", "cannot be combined with advantage_level: turn")
        if not self.compares_groups:
            problems.add("num_trees", "is not read by no_baseline, which compares nothing; leave it out")

    @classmethod
    def losses(cls, run: MethodSettings) -> list[tuple[str, dict[str, Any]]]:
        """Every loss (grpo_clip only if the run uses it), then the run's loss with other values of scale_rewards."""
        made = [(loss, chosen) for loss, chosen in super().losses(run) if loss != "grpo_clip" or loss == run.loss_name]
        own = run.loss_type if isinstance(run, GRPOMethod) and run.loss_type != "no_baseline" else "grpo"
        scales = [scale for scale in ("group", "batch", "none") if scale != getattr(run, "scale_rewards", "group")]
        return [*made, *((own, {"loss_type": own, "scale_rewards": scale}) for scale in scales)]

    def check(self, problems: Problems) -> None:
        super().check(problems)
        self._check_trees(problems)
        plain = not self.clips
        if not self.compares_groups and self.scale_rewards != "group":
            problems.add("scale_rewards", "is not read by no_baseline; leave it out")
        if self.importance_sampling_level is not None and plain:
            problems.add(
                "importance_sampling_level", f"is not read by {self.loss_type}, which has no ratios; leave it out"
            )
        for name in ("epsilon", "epsilon_high"):
            if plain and not self.is_default(name):
                problems.add(name, f"is not read by {self.loss_type}, which clips nothing; leave it out")
        if self.loss_type == "cispo" and self.epsilon_high is not None and not self.is_default("epsilon"):
            problems.add("epsilon", "is not read by cispo with epsilon_high, which caps the ratio; leave it out")
        if self.importance_sampling_level == "sequence" and self.loss_type == "cispo":
            problems.add("importance_sampling_level", "is sequence, but cispo has a weight for each token")
        if self.importance_sampling_level == "token" and self.loss_type == "gspo":
            problems.add(
                "importance_sampling_level",
                "is token, but gspo is the loss with one ratio per sequence; loss_type: grpo has one per token",
            )
        if plain and self.updates != 1:
            problems.add(
                "num_minibatches" if self.num_minibatches > 1 else "num_iterations",
                f"gives a step {self.updates} updates, but {self.loss_type} has no ratio that would correct for the "
                "changes of the policy between them; give 1, or another loss_type",
            )


class RLOOMethod(PolicyGradientMethod):
    """REINFORCE leave-one-out: the baseline is the mean reward of the prompt's other completions."""

    type: Literal["rloo"] = Field(default="rloo", description="REINFORCE leave-one-out.")
    kl_estimator: KLEstimator = Field(default="k1", description="Estimator of the KL to the reference.")
    kl_in: Literal["loss", "reward"] = Field(
        default="reward", description="Use of the KL: as a term of the loss, or as a penalty on the reward."
    )


class ReinforcePlusPlusMethod(PolicyGradientMethod):
    """REINFORCE++: each token's return is normalised over the whole step, without groups or a value model."""

    type: Literal["reinforce_plus_plus"] = Field(
        default="reinforce_plus_plus", description="REINFORCE with returns normalised over the step."
    )
    num_generations: Positive = Field(default=1, description="Number of completions per prompt.")
    kl_estimator: KLEstimator = Field(default="k1", description="Estimator of the KL to the reference.")
    kl_in: Literal["loss", "reward"] = Field(
        default="reward", description="Use of the KL: as a term of the loss, or as a penalty on the reward."
    )

    @property
    def compares_groups(self) -> bool:
        return False

    def check(self, problems: Problems) -> None:
        super().check(problems)
        if not self.is_default("advantage_level"):
            problems.add(
                "advantage_level", "is not read by reinforce_plus_plus, whose tokens have returns; leave it out"
            )


class PPOMethod(RewardedMethod):
    """Proximal policy optimisation: a value head predicts the return at each token."""

    learning_rates = (3e-6, 3e-5)
    trains_values = True
    own_names = PPO_NAMES

    type: Literal["ppo"] = Field(default="ppo", description="Proximal policy optimisation with a value head.")
    num_generations: Positive = Field(default=1, description="Number of completions per prompt.")
    num_minibatches: Positive = Field(
        default=2, description="Number of minibatches that a step's prompts are split into, each with its own update."
    )
    num_ppo_epochs: Positive = Field(default=4, description="Number of passes over a step's completions.")
    cliprange: Annotated[Float, Field(gt=0)] = Field(
        default=0.2, description="Clip range, around 1, of the ratio to the old policy."
    )
    cliprange_value: Annotated[Float, Field(gt=0)] = Field(
        default=0.2, description="Clip range of the value head's output around its old output."
    )
    vf_coef: Annotated[Float, Field(gt=0)] = Field(default=1.0, description="Weight of the value loss.")
    normalize_returns: bool = Field(
        default=True, description="Whether the value head predicts returns normalised by their running mean and spread."
    )
    whiten_rewards: bool = Field(
        default=False,
        description="Whether to scale a step's token rewards to a standard deviation of 1 and keep their mean.",
    )
    gamma: Annotated[Float, Field(gt=0, le=1)] = Field(default=1.0, description="Discount factor per token.")
    lam: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.95, description="GAE's lambda: 0 relies on the values, 1 on the rewards."
    )
    kl_coef: Annotated[Float, Field(ge=0)] = Field(
        default=0.05, description="Weight of the KL to the reference in each token's reward; 0: no reference."
    )
    kl_estimator: KLEstimator = Field(default="k1", description="Estimator of the KL to the reference.")
    target_kl: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, description="Target KL that kl_coef adapts to, in nats per completion; null: kl_coef is fixed."
    )
    kl_horizon: Positive = Field(
        default=10_000, description="Number of completions over which kl_coef adapts to target_kl; fewer: faster."
    )

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def updates(self) -> int:
        return self.num_ppo_epochs * self.num_minibatches

    @property
    def regrades_exactly(self) -> bool:
        return not self.whiten_rewards

    def check(self, problems: Problems) -> None:
        if self.target_kl is not None and self.kl_coef <= 0:
            problems.add("target_kl", "needs a kl_coef above 0: kl_coef adapts by factors, so 0 would never change")
        if not self.is_default("kl_horizon") and self.target_kl is None:
            problems.add("kl_horizon", "has no effect without target_kl; leave it out")
        if self.ref_model is not None and self.kl_coef <= 0:
            problems.add("ref_model", "names a reference, but kl_coef is 0: nothing reads it")
        super().check(problems)


class DistillMethod(OnlineMethod):
    """On-policy distillation: a teacher scores every token of the student's completions."""

    learning_rates = (1e-5, 1e-4)
    loss_setting = "divergence"
    example = ("Qwen/Qwen3-0.6B-Base", "gsm8k")

    type: Literal["distill"] = Field(default="distill", description="On-policy distillation from a teacher.")
    teacher: ModelPath | None = Field(
        default=None,
        description="Hub id or folder of the teacher, with the same tokenizer; null: the model itself before training.",
    )
    teacher_system_prompt: str | None = Field(
        default=None, description="System prompt of the teacher; null: the student's, data.system_prompt."
    )
    num_generations: Positive = Field(default=1, description="Number of completions per prompt.")
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = Field(
        default="reverse_kl", description="Divergence between student and teacher to minimise at every token."
    )
    jsd_beta: Share = Field(
        default=0.5, description="Weight of the teacher in jsd; 0 is the forward KL, 1 the reverse KL."
    )
    on_policy_fraction: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=1.0, description="Share of the prompts that the student completes; the rest use the data's completions."
    )

    @model_validator(mode="before")
    @classmethod
    def _former_name(cls, values: Any) -> Any:
        """Accept `jensen_shannon`, which runs of earlier versions saved."""
        former = isinstance(values, dict) and values.get("divergence") == "jensen_shannon"
        return values | {"divergence": "jsd"} if former else values

    def reads(self, setting: str) -> bool:
        return super().reads(setting) and (setting != "jsd_beta" or self.divergence == "jsd")

    def check(self, problems: Problems) -> None:
        if self.teacher is None and self.teacher_system_prompt is None:
            problems.add(
                "teacher",
                "is missing: name a model to learn from, or give teacher_system_prompt to learn from the model itself "
                "with another prompt",
            )
        if not self.is_default("jsd_beta") and self.divergence != "jsd":
            problems.add("jsd_beta", f"is read by divergence: jsd only, not by {self.divergence}; leave it out")
