"""The settings of the methods that learn from given completions. A method has only the fields that it reads."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from posttrain.config.schema.base import Conflicts, MethodSettings, Precompute, ReferenceMethod, setting
from posttrain.config.schema.types import AboveZero, BelowOne, Float, NonNegative, OneOrMore, OrOwn, is_own

PreferenceLoss = Literal[
    "sigmoid", "hinge", "ipo", "kto_pair", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
TokenLoss = Literal["nll", "dft", "eaft"]
UnpairedLoss = Literal["kto", "bco", "apo_zero_unpaired"]
ContrastiveLoss = Literal["sigmoid", "hinge", "ipo", "simpo"]
Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

# Losses that depend only on the difference chosen - rejected; f-divergences are defined for these (as in TRL 1.16).
F_DIVERGENCE_LOSSES = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"})
# With reference log-probabilities of 0, these losses still compare chosen and rejected; others need the reference.
REFERENCE_FREE_LOSSES = F_DIVERGENCE_LOSSES | {"aot", "aot_unpaired"}
EXO_SMOOTHING = 0.001  # label_smoothing of exo_pair in its paper; it must be above 0
LABEL_SMOOTHING_LOSSES = frozenset({"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"})

AssistantOnly = Annotated[
    bool, Field(description="Whether to train only on the assistant's turns; with a prompt, those of the completion.")
]


class SFTMethod(MethodSettings):
    """Supervised fine-tuning: negative log-likelihood of the target tokens."""

    kind = "sft"
    example = ("Qwen/Qwen3-0.6B-Base", "trl-lib/Capybara")
    dropout = True
    learning_rates = (2e-5, 2e-4)
    measured = ("entropy", "mean_token_accuracy")
    headline = "loss"
    loss_setting = "loss_type"
    read_by = (("eaft_alpha", frozenset({"eaft"})), ("label_smoothing_factor", frozenset({"nll"})))

    type: Literal["sft"] = setting("sft", "Supervised fine-tuning.")
    loss_type: OrOwn[TokenLoss] = setting(
        "nll", "Loss of a token: nll, dft (weighted by its probability), eaft (by entropy) or module:function."
    )
    eaft_alpha: NonNegative = setting(1.0, "Power of eaft's weight, the entropy of the 20 largest logits / log 20.")
    label_smoothing_factor: BelowOne = setting(
        0.0, "Share of each target that is spread evenly over the vocabulary (label smoothing)."
    )
    neftune_noise_alpha: AboveZero | None = setting(
        None, "Strength of uniform noise on the embeddings in training, usually 5 (NEFTune); null: none."
    )
    completion_only_loss: bool | None = setting(
        None, "Whether to train only on the completion; null: if the data has a prompt."
    )
    assistant_only_loss: AssistantOnly = False

    def reads(self, setting: str) -> bool:
        return super().reads(setting) and not (is_own(self.loss_type) and setting in dict(self.read_by))

    def check(self) -> Conflicts:
        yield from super().check()
        if self.completion_only_loss and self.assistant_only_loss:
            yield "assistant_only_loss", "conflicts with completion_only_loss: true, which trains on the last turn only"


class RewardMethod(MethodSettings):
    """Reward model: Bradley-Terry loss on pairs, scalar head on the last token."""

    learns_ties = True
    example = ("openai-community/gpt2", "Anthropic/hh-rlhf")
    head = "reward"
    learning_rates = (1e-5, 1e-4)
    measured = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")
    headline = "accuracy"

    type: Literal["reward"] = setting("reward", "Reward model.")
    center_rewards_coefficient: NonNegative | None = setting(
        None, "Weight of (chosen + rejected)^2, which keeps rewards near 0; usually 0.01; null: none."
    )

    @classmethod
    def losses(cls, run: MethodSettings) -> list[tuple[str, dict[str, Any]]]:
        return [("reward", {}), ("reward", {"center_rewards_coefficient": 0.01})]


class PreferenceMethod(MethodSettings):
    """Base of the methods that learn from pairs which completion to prefer."""

    example = ("Qwen/Qwen3-0.6B", "trl-lib/ultrafeedback_binarized")
    measured = (
        *("entropy", "mean_token_accuracy", "logps/chosen", "logps/rejected"),
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    )
    headline = "rewards/accuracies"

    assistant_only_loss: AssistantOnly = False


class DPOMethod(ReferenceMethod, PreferenceMethod):
    """Direct preference optimisation and its variants; `type: ipo` is `dpo` with `loss_type: ipo`."""

    learning_rates = (1e-6, 1e-5)
    starts_as_reference = True
    loss_setting = "loss_type"
    read_by = (("label_smoothing", LABEL_SMOOTHING_LOSSES), ("discopop_tau", frozenset({"discopop"})))

    type: Literal["dpo"] = setting("dpo", "Preference optimisation on pairs: DPO and its variants.")
    loss_type: Annotated[tuple[OrOwn[PreferenceLoss], ...], OneOrMore, Field(min_length=1)] = setting(
        ("sigmoid",), "Loss, module:function, or a list of losses whose sum is minimised."
    )
    loss_weights: tuple[NonNegative, ...] | None = setting(None, "Weights of the losses in the list; null: 1 each.")
    beta: AboveZero = setting(0.1, "Strength of the regularisation towards the reference; IPO's tau.")
    label_smoothing: BelowOne = setting(0.0, "Share of pairs assumed to have flipped labels.")
    f_divergence_type: Divergence = setting("reverse_kl", "Divergence from the reference (f-DPO).")
    f_alpha_divergence_coef: Float = setting(0.5, "The alpha of alpha_divergence.")
    discopop_tau: AboveZero = setting(0.05, "Temperature of the discopop loss.")
    use_ref_model: bool = setting(
        True, "Whether a second model may be the reference; false: adapter off, or precomputed scores."
    )
    reference_free: bool = setting(
        False, "Whether the reference's log-probabilities are set to 0; not all losses allow it."
    )
    precompute_ref_log_probs: Precompute = False

    @property
    def loss_name(self) -> str:
        return "+".join(self.loss_type)

    @classmethod
    def losses(cls, run: MethodSettings) -> list[tuple[str, dict[str, Any]]]:
        needed = {} if getattr(run, "label_smoothing", 0) else {"label_smoothing": EXO_SMOOTHING}
        names: tuple[str, ...] = get_args(PreferenceLoss)
        return [(name, {"loss_type": (name,)} | (needed if name == "exo_pair" else {})) for name in names]

    def reads(self, setting: str) -> bool:
        return super().reads(setting) and not (setting == "beta" and self.loss_type == ("sft",))

    def check(self) -> Conflicts:
        yield from super().check()
        yield from self._check_losses(set(self.loss_type))
        yield from self._check_reference(set(self.loss_type))

    def _check_losses(self, losses: set[str]) -> Conflicts:
        weights = self.loss_weights
        if len(losses) != len(self.loss_type):
            yield "loss_type", "names a loss twice; give it a weight in loss_weights instead"
        if weights is not None and len(weights) != len(self.loss_type):
            yield "loss_weights", f"has {len(weights)} weights for {len(self.loss_type)} losses; give one for each"
        if weights is not None and not any(weights):
            yield "loss_weights", "are all 0; nothing would be trained"
        if any(map(is_own, losses)):
            return  # which settings it reads is known when it is imported
        if self.label_smoothing >= 0.5 and "robust" in losses:
            yield "label_smoothing", f"is {self.label_smoothing}, but robust divides by 1 - 2 x it; set it below 0.5"
        if self.label_smoothing <= 0 and "exo_pair" in losses:
            yield "label_smoothing", "is 0; exo_pair takes its logarithm and needs more than 0 (the paper uses 0.001)"
        if self.f_divergence_type != "reverse_kl" and not losses <= F_DIVERGENCE_LOSSES:
            yield (
                "f_divergence_type",
                f"other than reverse_kl is defined for {names(F_DIVERGENCE_LOSSES)}, not for "
                f"{names(losses - F_DIVERGENCE_LOSSES)}",
            )
        if self.f_divergence_type != "reverse_kl" and losses == {"sft"}:
            yield "f_divergence_type", "is not read by sft, which has no reference; leave it out"
        if not self.is_default("f_alpha_divergence_coef") and self.f_divergence_type != "alpha_divergence":
            yield "f_alpha_divergence_coef", f"is for alpha_divergence, not for {self.f_divergence_type}; leave it out"

    def _check_reference(self, losses: set[str]) -> Conflicts:
        if not self.use_ref_model and self.ref_model is not None:
            yield "ref_model", "names a reference, but with use_ref_model: false it is the policy itself"
        if not self.reference_free:
            return
        losses = {name for name in losses if not is_own(name)}
        if needing := losses - REFERENCE_FREE_LOSSES:
            yield "reference_free", f"is true, but {names(needing)} cannot do without a reference"
        if self.precompute_ref_log_probs:
            yield "precompute_ref_log_probs", "is true, but with reference_free: true there is no reference to compute"
        if self.ref_model is not None:
            yield "ref_model", "names a reference, but reference_free is true"
        if self.f_divergence_type != "reverse_kl":
            yield "f_divergence_type", "measures the divergence from a reference, but reference_free is true"


class ORPOMethod(PreferenceMethod):
    """Odds ratio preference optimisation: likelihood of the chosen completion and an odds ratio; no reference."""

    example = ("Qwen/Qwen3-0.6B-Base", "trl-lib/ultrafeedback_binarized")
    learning_rates = (8e-6, 8e-5)
    measured = (*PreferenceMethod.measured, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    type: Literal["orpo"] = setting("orpo", "Odds ratio preference optimisation, without a reference.")
    beta: AboveZero = setting(0.1, "Weight of the odds-ratio term relative to the likelihood; the paper's lambda.")
    completion_only_loss: bool = setting(
        False, "Whether the likelihood term covers only the chosen completion; false: also its prompt."
    )


class CPOMethod(PreferenceMethod):
    """Contrastive preference optimisation: DPO with a uniform reference, and the likelihood of the chosen reply."""

    learning_rates = (8e-6, 8e-5)
    measured = (*PreferenceMethod.measured, "nll_loss")
    loss_setting = "loss_type"
    read_by = (("label_smoothing", frozenset({"sigmoid", "simpo"})), ("simpo_gamma", frozenset({"simpo"})))

    type: Literal["cpo"] = setting("cpo", "Contrastive preference optimisation, without a reference.")
    loss_type: ContrastiveLoss = setting("sigmoid", "Loss that compares chosen and rejected.")
    beta: AboveZero = setting(0.1, "Scale of the comparison; IPO's tau.")
    label_smoothing: BelowOne = setting(0.0, "Share of pairs assumed to have flipped labels.")
    cpo_alpha: NonNegative = setting(1.0, "Weight of the chosen completion's negative log-likelihood per token.")
    simpo_gamma: NonNegative = setting(0.5, "Margin of loss_type: simpo.")
    alpha: Float = setting(0.0, "AlphaPO's reward shape (1 - p^-alpha) / alpha; 0: log p.")

    @property
    def loss_name(self) -> str:
        return "cpo" if self.loss_type == "sigmoid" else f"cpo_{self.loss_type}"

    @classmethod
    def losses(cls, run: MethodSettings) -> list[tuple[str, dict[str, Any]]]:
        return [(cls(**chosen).loss_name, chosen) for _, chosen in super().losses(run)]


class SimPOMethod(PreferenceMethod):
    """Simple preference optimisation: log-probabilities per token as rewards, with a margin; without a reference."""

    learning_rates = (1e-6, 1e-5)
    measured = (*PreferenceMethod.measured, "nll_loss")

    type: Literal["simpo"] = setting("simpo", "Simple preference optimisation, without a reference.")
    beta: AboveZero = setting(2.0, "Scale of the rewards, which are log-probabilities per token.")
    simpo_gamma: NonNegative = setting(1.0, "Target margin of the rewards; about half of beta.")
    label_smoothing: BelowOne = setting(0.0, "Share of pairs assumed to have flipped labels.")
    cpo_alpha: NonNegative = setting(
        0.0, "Weight of the chosen completion's negative log-likelihood per token (CPO-SimPO)."
    )
    alpha: Float = setting(0.0, "AlphaPO's reward shape (1 - p^-alpha) / alpha; 0: log p.")


class KTOMethod(ReferenceMethod):
    """Kahneman-Tversky optimisation: single completions that are labelled desirable or undesirable."""

    kind = "unpaired"
    example = ("Qwen/Qwen3-0.6B", "trl-lib/kto-mix-14k")
    learning_rates = (1e-6, 1e-5)
    measured = ("entropy", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected", "rewards/margins")
    headline = "rewards/margins"
    starts_as_reference = True
    loss_setting = "loss_type"

    type: Literal["kto"] = setting("kto", "Single completions labelled desirable or undesirable.")
    assistant_only_loss: AssistantOnly = False
    loss_type: OrOwn[UnpairedLoss] = setting("kto", "Loss: kto, bco, apo_zero_unpaired or module:function.")
    beta: AboveZero = setting(0.1, "Strength of the regularisation towards the reference.")
    desirable_weight: NonNegative = setting(1.0, "Weight of desirable completions, to balance classes of unequal size.")
    undesirable_weight: NonNegative = setting(1.0, "Weight of undesirable completions.")
    precompute_ref_log_probs: Precompute = False

    @property
    def joins_completions(self) -> bool:
        return self.loss_type == "kto" or is_own(self.loss_type)  # the KL is estimated from other completions

    def check(self) -> Conflicts:
        yield from super().check()
        if self.desirable_weight + self.undesirable_weight <= 0:
            yield "desirable_weight", "and undesirable_weight are both 0; nothing would be trained"


def names(values: set[str] | frozenset[str]) -> str:
    """The values in alphabetical order, for a message."""
    return ", ".join(sorted(values))
