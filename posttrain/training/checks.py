"""Checks of invariants that hold in every healthy run. A failure stops the run and names the check and its cause.

Alarms in online runs report problems that leave every number finite. Alarms are counted in the metrics and logged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.base.errors import VitalSignError
from posttrain.base.log import log
from posttrain.batch import Example, Pack, sequences
from posttrain.config.schema.base import MethodSettings
from posttrain.config.schema.online import RewardedMethod
from posttrain.engines.embedded import evaluating
from posttrain.losses.policy import sampling_weights
from posttrain.models.families import base_of
from posttrain.models.sharding import at_rest, own_part, whole
from posttrain.optim.adamw import AdamW
from posttrain.parallel.ranks import Ranks
from posttrain.runs.checks import MESSAGES, MOVED, PACKED, RATIO, SAMPLER, SAVED, START, Finding
from posttrain.runs.files import bits
from posttrain.scoring import RewardScorer, Scorer

PackOf = Callable[[list[Example]], list[Pack]]
COLLAPSED = 0.05  # entropy alarm below this share of the first step's entropy
WITHOUT_VERDICT = 0.005  # alarm above this share of completions without a verdict
EFFECTIVE = 0.9  # effective sample size / tokens; below this value the engine's policy is not the trainer's
EVERY = 20  # an alarm is logged the first time and then every 20th time

Record = Callable[[Finding], None]


def ignore(finding: Finding) -> None:
    """Record nothing."""


def conclude(finding: Finding, record: Record, problem: str | None) -> None:
    """Record a check's finding. Raises VitalSignError with the check's problem, if there is one."""
    record(replace(finding, failed=problem is not None))
    if problem is not None:
        raise VitalSignError(problem)


@dataclass(frozen=True)
class Noise:
    """Limits on the rounding differences between two computations of the same log-probabilities (nats).

    With bfloat16's 8 bits through tens of layers, a few tokens differ a lot: for one model in different chunks,
    the standard deviation is 0.055 and the largest of 3,916 differences is 0.66 (TRL's issue 6789). A limit on only the
    largest difference would stop healthy runs, sooner with more tokens. A real fault changes many tokens at once.
    """

    rms: float  # root mean square; the limit is higher for few tokens
    most: float  # largest difference after excluding one token in a hundred and three more
    largest: float  # largest difference of all tokens

    def check(self, name: str, difference_N: torch.Tensor, record: Record, problem: str, unit: str = "nats") -> None:
        """Record the root mean square of the differences, with its limit. If the differences exceed rounding, raise
        VitalSignError with `problem`, in which {} is replaced by a description of the differences."""
        count, excess = max(difference_N.numel(), 1), self.excess(difference_N)
        rms = float(difference_N.detach().double().square().sum().div(count).sqrt())
        finding = Finding(name, rms, self.rms * (1 + 3 / count**0.5), unit)
        conclude(finding, record, problem.format(excess) if excess else None)

    def excess(self, difference_N: torch.Tensor) -> str | None:
        """A description of the differences that exceed rounding, or of NaN; None if there are none."""
        sorted_N = difference_N.detach().abs().flatten().double().sort(descending=True).values
        if not len(sorted_N):
            return None
        if sorted_N.isnan().any():
            return "is NaN"
        count, rms, largest = len(sorted_N), float(sorted_N.square().mean().sqrt()), float(sorted_N[0])
        rms_limit, outliers = self.rms * (1 + 3 / count**0.5), count // 100 + 3
        if rms > rms_limit:
            return f"differs by {rms:.3g} nats (root mean square of {count:,}; at most {rms_limit:.2g})"
        if count > outliers and (other := float(sorted_N[outliers])) > self.most:
            return f"differs by {other:.3g} nats or more for {outliers + 1:,} of {count:,} (at most {self.most})"
        if largest > self.largest:
            return f"differs by {largest:.3g} nats for one of {count:,} (at most {self.largest})"
        return None


ROUNDING = {torch.float32: Noise(5e-4, 2e-3, 2e-2), torch.bfloat16: Noise(0.15, 0.5, 10.0)}
ROUNDING[torch.float16] = ROUNDING[torch.bfloat16]  # with three bits more; not measured

# Limits (nats) of a sequence's log-ratio over the square root of its tokens, whose noise is mostly independent.
MARGIN = {torch.float32: 2e-3, torch.bfloat16: 0.5, torch.float16: 0.5}


@torch.no_grad()
def check_packing(
    scorer: Scorer | RewardScorer, examples: Sequence[Example], pack_of: PackOf, record: Record = ignore
) -> float:
    """Check that a pack gives the log-probabilities, or rewards, of plain calls of the model, one sequence at a time.

    The pack contains the first and the last example. Returns the largest difference; raises VitalSignError if the
    differences exceed rounding.
    """
    rewards, few = isinstance(scorer, RewardScorer), [examples[0], *examples[1:][-1:]]
    laid = pack_of(few)[0]
    pack = laid.to(next(scorer.parameters()).device)
    base = base_of(scorer.model)
    implementation = base.config._attn_implementation or "eager"
    last = pack.num_sequences - 1
    ends = sorted({0, min(1, last), max(last - 1, 0), last})  # the last test attention between examples
    paths = sequences_of(pack, few)

    def plain(sequence: int) -> torch.Tensor:
        ids_L, trained_L = (torch.from_numpy(a.copy()).to(pack.tokens_T.device) for a in paths[sequence])
        if rewards:
            return base(input_ids=ids_L[None], use_cache=False).logits[0].float()
        logits = base(input_ids=ids_L[None, :-1], use_cache=False).logits[0].float()
        return logits.log_softmax(-1).gather(1, ids_L[1:, None]).squeeze(1)[trained_L[1:]]

    try:
        with evaluating(scorer), whole(scorer):
            got = scorer(pack)[:, None] if rewards else scorer(pack).logprob_N.split(laid.length_S.tolist())
            types = {p.dtype for p in scorer.parameters()}
            base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
            difference_N = torch.cat([(got[sequence] - plain(sequence)).abs() for sequence in ends])
    finally:
        base.set_attn_implementation(implementation)
    what, unit = ("a reward", "") if rewards else ("a log-probability", "nats")
    problem = (
        f"packed = unpacked fails: {what} of the first batch {{}} from plain transformers. The attention of "
        f"`{base.config.model_type}` does not handle packs correctly: set model.attention: eager, and report this model"
    )
    coarsest = next((half for half in (torch.bfloat16, torch.float16) if half in types), torch.float32)
    ROUNDING[coarsest].check(PACKED, difference_N, record, problem, unit)
    return float(difference_N.amax())


def sequences_of(pack: Pack, examples: Sequence[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The token ids and targets of each sequence of a pack, from the examples that were packed."""
    groups = dict.fromkeys(pack.groups)
    return [path for group in groups for tree in examples[group].trees for path in sequences(tree)]


@torch.no_grad()
def check_margins(
    logratio_S: torch.Tensor, length_S: torch.Tensor, dtype: torch.dtype, record: Record = ignore
) -> float:
    """Check that before the first update the policy equals its reference: every log-ratio, and so every margin, is 0.

    Takes the log-ratio and the number of scored tokens of each sequence. Returns the largest log-ratio over the square
    root of the number of tokens (nats); raises VitalSignError if it exceeds rounding in `dtype`.
    """
    relative_S = logratio_S.abs() / length_S.clamp(min=1).sqrt()
    worst, at = float(relative_S.amax()), int(relative_S.argmax())  # NaN counts as the largest in both
    problem = (
        f"margins are not 0 at the start: policy and reference differ by {float(logratio_S[at].abs()):.3g} nats on "
        f"a sequence of {int(length_S[at])} tokens of the first batch, before any update. The "
        "reference is not the model that the policy starts from (other weights, an active adapter, or dropout in one "
        "of them). If that is intended, set method.ref_model to the reference"
    )
    finding = Finding(START, worst, MARGIN[dtype], "nats over the root of a sequence's tokens")
    conclude(finding, record, None if worst <= MARGIN[dtype] else problem)
    return worst


def check_sampler(difference_R: torch.Tensor, dtype: torch.dtype, engine: str, record: Record = ignore) -> None:
    """Check that the engine samples from the trained policy: log-probabilities differ only by rounding errors.

    Takes the differences (nats) of a step's tokens. Raises VitalSignError above twice the limits for two computations
    by the trainer in `dtype`; smaller differences raise at most an alarm, which does not end the run.
    """
    own = ROUNDING[dtype]
    twice = Noise(2 * own.rms, 2 * own.most, 2 * own.largest)
    problem = (
        f"sampler = trainer fails: the log-probability of sampled tokens {{}} between the engine ({engine}) and the "
        "trainer. The engine has different weights (stale, with another adapter or in another dtype) or a different "
        "temperature; with rollout.engine: embedded, the two are the same model, so report this"
    )
    twice.check(SAMPLER, difference_R, record, problem)


@torch.no_grad()
def check_ratio(logratio_N: torch.Tensor, dtype: torch.dtype, record: Record = ignore) -> None:
    """Check that before the first update the policy equals the old policy: every ratio is 1 up to rounding."""
    problem = (
        "ratio = 1 fails: before the first update the log-probability of tokens {} from that of the old policy, which "
        "is the same model. The second scoring differs (dropout, an adapter switched on or off, different packs)"
    )
    ROUNDING[dtype].check(RATIO, logratio_N, record, problem)


class MovedWeights:
    """Checks that the first update changes at least one trained tensor and no frozen tensor."""

    def __init__(self, policy: nn.Module, optimizer: AdamW):
        at_rest(policy)
        self.frozen = {name: own_part(p) for name, p in policy.named_parameters() if not p.requires_grad}
        self.trained = optimizer.values
        self.before = fingerprints(self.frozen), fingerprints(self.trained)

    def check(self, learning_rate: float, grad_norm: float, record: Record = ignore) -> None:
        """Raise VitalSignError if the check fails after an update whose learning rate and gradient norm exceed 0."""
        frozen, trained = fingerprints(self.frozen), fingerprints(self.trained)
        moved = [name for name in frozen if frozen[name] != self.before[0][name]]
        changed = sum(trained[name] != self.before[1][name] for name in trained)
        seen = f"{changed:,} of {len(trained):,} trained tensors, {len(moved):,} of {len(frozen):,} frozen ones"
        problem = None
        if moved:
            problem = (
                f"a frozen tensor moved in the first update: {moved[0]} ({len(moved)} in total). "
                "The tensor shares memory with a trained one, or something else writes to it"
            )
        elif not changed:
            problem = (
                f"no trained tensor moved in the first update, at learning rate {learning_rate:.1e} and gradient norm "
                f"{grad_norm:.1e}: the rate is below float32's resolution, or the optimizer updates other tensors"
            )
        conclude(Finding(MOVED, seen=seen), record, problem)


@torch.no_grad()
def check_finite(tensors: Mapping[str, torch.Tensor], step: int, record: Record = ignore) -> None:
    """Raise VitalSignError if a trained tensor contains NaN or infinity: such weights are never saved."""
    bad = [name for name, t in tensors.items() if not bool(t.isfinite().all())]
    problem = (
        f"weights are not finite at step {step}, so they are not saved: {bad[0]} ({len(bad)} of {len(tensors)} "
        "tensors). Resume from the last checkpoint with a lower training.learning_rate"
        if bad
        else None
    )
    conclude(Finding(SAVED, seen=f"{len(tensors) - len(bad):,} of {len(tensors):,} tensors"), record, problem)


def check_same_weights(ranks: Ranks, tensors: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise VitalSignError unless trained tensors are equal on all ranks, bit for bit; skipped if they are sharded."""
    if ranks.size == 1 or ranks.in_step:
        return
    first, *others = ranks.gather(fingerprints(tensors))
    different = [rank for rank, checksums in enumerate(others, 1) if checksums != first]
    if different:
        raise VitalSignError(
            f"the weights of rank {different[0]} differ from those of rank 0 at step {step} ({len(different)} of "
            f"{ranks.size} ranks differ): something in the step is not the same on every rank. Resume from the last "
            "checkpoint; if it happens again, report it"
        )


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A checksum per tensor: the sum of the tensor's words, which almost surely changes if any bit changes."""
    return {name: int(bits(t).sum(dtype=torch.int64)) for name, t in tensors.items()}


class Alarms:
    """Checks each step's metrics, and counts alarms in `memory`, which checkpoints save, under alarms/{name}."""

    def __init__(self, memory: dict[str, float], method: MethodSettings):
        self.memory, self._method = memory, method

    def check(self, step: int, metrics: Mapping[str, float], all_equal: bool) -> None:
        """`all_equal`: whether all completions of the step that have a reward have the same reward."""
        entropy = metrics.get("entropy")
        if entropy is not None:
            self.memory.setdefault("first_entropy", entropy)
        without, method = metrics.get("rewards/left_out_ratio", 0.0), self._method
        no_spread = metrics.get("frac_reward_zero_std", 0.0) == 1.0 and without < 1.0
        successful = metrics.get("self_distillation/success_sample_fraction")
        raised = {
            "no_spread": method.compares_groups and no_spread,
            "equal_rewards": method.needs_rewards and not method.compares_groups and all_equal,
            "truncated": metrics.get("completions/clipped_ratio", 0.0) == 1.0,
            "no_reward": without == 1.0,
            "no_verdict": metrics.get("rewards/no_verdict_ratio", 0.0) > WITHOUT_VERDICT and without < 1.0,
            "entropy": entropy is not None and entropy < COLLAPSED * self.memory["first_entropy"],
            "no_success": successful == 0.0,
            "no_room": bool(successful) and metrics.get("self_distillation/reprompt_sample_fraction") == 0.0,
            "sampler": metrics.get("sampling/effective_sample_size", 1.0) < EFFECTIVE,
        }
        for name in (name for name, is_raised in raised.items() if is_raised):
            count = self.memory[f"alarms/{name}"] = self.memory.get(f"alarms/{name}", 0.0) + 1
            if count % EVERY == 1:
                log.warning("step %d: %s", step, MESSAGES[name])


def sampler_mismatch(trainer_N: Tensor, sampler_N: Tensor) -> dict[str, float]:
    """The mismatch between the trainer's and the engine's log-probabilities of the sampled tokens; names as in TRL.

    The effective sample size of the weights w = trainer / engine, (Σw)² / (n Σw²), is 1 if they agree.
    """
    difference_N = (trainer_N - sampler_N).abs()
    weight_N = (trainer_N - sampler_N).double().exp()
    return {
        "sampling/sampling_logp_difference/mean": difference_N.mean().item(),
        "sampling/sampling_logp_difference/max": difference_N.max().item(),
        "sampling/sampling_logp_difference/rms": difference_N.square().mean().sqrt().item(),
        "sampling/effective_sample_size": (weight_N.sum() ** 2 / (len(weight_N) * (weight_N**2).sum())).item(),
    }


def importance_metrics(
    method: RewardedMethod, trainer_N: Tensor, sampler_N: Tensor, length_S: Tensor
) -> dict[str, float]:
    """The extremes and mean of the importance weights, names as in TRL, and the share of tokens that were clipped."""
    if method.importance_sampling is None:
        return {}
    where, settings = (torch.arange(len(length_S)).repeat_interleave(length_S), length_S), method.importance_sampling
    weight_N, clipped_N = sampling_weights(trainer_N, sampler_N, *where, **dict(settings))
    values = {
        "min": weight_N.min(),
        "mean": weight_N.mean(),
        "max": weight_N.max(),
        "clipped": clipped_N.float().mean(),
    }
    return {f"sampling/importance_sampling_ratio/{name}": value.item() for name, value in values.items()}
