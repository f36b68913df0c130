"""The models that training compares the policy with: the reference, and the teacher of a distillation.

The reference is the policy with its adapter off, a frozen model, or precomputed log-probabilities. The teacher predicts
the tokens of the student's completions, and may have its own prompts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.base.console import progress
from posttrain.base.errors import DataError, ModelError, RunError
from posttrain.base.files import default_cache
from posttrain.base.log import log
from posttrain.batch import Example, Pack, sent
from posttrain.config import DistillMethod, RunConfig
from posttrain.config.schema.base import MethodSettings, ReferenceMethod
from posttrain.data import Dataset, Prepared
from posttrain.data.prompts import Reprompt
from posttrain.data.teacher import check_teacher, longest_fed, teacher_prompts
from posttrain.distillation import Head, Top
from posttrain.models.families import base_of, head_layer, is_adapted, positions_of
from posttrain.models.load import load_model, load_tokenizer
from posttrain.models.lora import as_at_start
from posttrain.models.sharding import at_rest, own_part, own_rows, whole
from posttrain.rollout import Ids, Rollout, RolloutPack, with_prompts
from posttrain.runs.checkpoint import save_folder, verify
from posttrain.runs.files import load_parts, load_tensors, save_tensors
from posttrain.runs.inputs import reference_settings
from posttrain.scoring import Scorer, scored_states
from posttrain.training.checks import fingerprints, sequences_of
from posttrain.training.job import Job

# From a pack and its examples to the log-probability (S) of each sequence under the reference.
Reference = Callable[[Pack, list[Example]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Portion:
    """Examples that the reference scores before training, batch by batch, and their name in the cache."""

    name: str
    batches: Callable[[], Iterator[list[Example]]]
    count: int  # number of batches


PortionsOf = Callable[[Job, Prepared], Sequence[Portion]]


def make_reference(job: Job, tokens: TokenReference | None, data: Prepared, portions_of: PortionsOf) -> Reference:
    """The reference that the settings choose. A reference that scores before training scores the portions once and then
    looks examples up."""
    if tokens is None:
        return no_reference
    method = tokens.method
    if not (method.precomputes_reference or (method.avoids_second_model and not tokens.adapted)):
        return tokens.by_sequence
    key, score = _key(job, tokens.scorer, data), tokens.by_sequence
    tables = [_precomputed(job, score, portion, f"{key}-{portion.name}") for portion in portions_of(job, data)]
    keys = np.concatenate([table["key"].numpy().view(np.uint64) for table in tables])
    keys_K, first = np.unique(keys, return_index=True)  # ascending
    logprob_K = np.concatenate([table["logprob"].numpy() for table in tables])[first]

    def look_up(pack: Pack, examples: list[Example]) -> torch.Tensor:
        wanted = sequence_keys(pack, examples)
        at = np.searchsorted(keys_K, wanted)
        assert (keys_K[at] == wanted).all(), "a sequence was not precomputed"
        return sent(torch.from_numpy(logprob_K[at]), pack.tokens_T.device)

    return look_up


class TokenReference:
    """The reference: a function from a pack to the log-probability of each scored token (N), without gradients.

    It is another model, or the policy as it was before training: with its adapter off or in its initial state, or a
    frozen copy. With `sync_ref_model` it follows the policy, and `weights` are its weights by name, which checkpoints
    save: float32, of sharded weights this rank's parts. `weights` of any other reference is empty.
    """

    FILE = "reference"  # name in a checkpoint, without suffix

    def __init__(self, job: Job, method: MethodSettings, policy: Scorer, temperature: float = 1.0):
        self.method, self._temperature, path = method, temperature, method.reference_path
        self.adapted = policy.model if path is None and is_adapted(policy.model) else None
        self.scorer = policy if self.adapted else Scorer(frozen_model(job, path))
        ours, theirs = (base_of(scorer.model).config.vocab_size for scorer in (policy, self.scorer))
        if ours != theirs:
            raise ModelError(
                f"method.ref_model {path} has {theirs} token ids, but the policy has {ours}: use a reference with the "
                "same vocabulary"
            )
        self.weights: dict[str, Tensor] = {}
        if method.syncs_reference:
            self._follow(job, policy.model)

    @torch.no_grad()
    def __call__(self, pack: Pack) -> Tensor:
        with as_at_start(self.adapted) if self.adapted else nullcontext():
            return self.scorer(pack, self._temperature).logprob_N

    def by_sequence(self, pack: Pack, examples: Sequence[Example] = ()) -> Tensor:
        """The log-probability of each sequence (S), without gradients."""
        return pack.sum_by_sequence(self(pack))

    def _follow(self, job: Job, policy: nn.Module) -> None:
        """Set `weights`: those of the reference, or of the checkpoint."""
        self._parts = {name: own_part(p).detach() for name, p in self.scorer.model.named_parameters()}
        ours, theirs = {name: own_part(p).shape for name, p in policy.named_parameters()}, self._parts
        differ = [n for n in {**ours, **theirs} if n not in theirs or theirs[n].shape != ours.get(n)]
        if differ:
            raise ModelError(
                f"method.sync_ref_model mixes weights of equal shapes, but those of method.ref_model differ from the "
                f"policy's ({differ[0]}): use a reference of the same architecture, or sync_ref_model: false"
            )
        # A mixture in bfloat16 would lose changes below its resolution, so the exact weights are in CPU memory.
        self.weights = {n: p if p.dtype == torch.float32 else p.to("cpu", torch.float32) for n, p in theirs.items()}
        if job.checkpoint is not None:
            index, size = (job.ranks.index, job.ranks.size) if job.ranks.in_step else (0, 1)
            saved = load_parts(job.checkpoint, self.FILE, lambda name, rows: own_rows(index, size, rows))
            for name, weight in self.weights.items():
                weight.copy_(saved[name])
                self._parts[name].copy_(weight)

    @torch.no_grad()
    def sync(self, masters: Mapping[str, Tensor], before: int, updates: int) -> None:
        """Mix the policy into the reference if, after `before`, the number of the optimizer's updates has reached a
        multiple of `ref_model_sync_steps`: the soft update of TR-DPO, arXiv 2404.09656."""
        method = self.method
        assert isinstance(method, ReferenceMethod)
        if updates // method.ref_model_sync_steps == before // method.ref_model_sync_steps:
            return
        alpha, prefix = method.ref_model_mixup_alpha, "model." if method.trains_values else ""
        for name, weight in self.weights.items():
            weight.mul_(1 - alpha).add_(masters[f"{prefix}{name}"].to(weight.device), alpha=alpha)
            self._parts[name].copy_(weight)
        at_rest(self.scorer.model)  # what was gathered for the last pass has the old weights


def token_reference(job: Job, method: MethodSettings, *scoring: Any) -> TokenReference | None:
    """The `TokenReference` of a method, from the same arguments; None if it has none."""
    return None if is_reference_free(job.config, method) else TokenReference(job, method, *scoring)


def is_reference_free(config: RunConfig, method: MethodSettings) -> bool:
    """Whether the reference's log-probabilities are 0, which `use_ref_model: false` meant in earlier versions."""
    return not method.has_reference or (config.behavior_version < 2 and method.avoids_second_model)


def no_reference(pack: Pack, examples: list[Example]) -> torch.Tensor:
    """A reference that gives each sequence (S) the log-probability 0."""
    return torch.zeros(pack.num_sequences, device=pack.tokens_T.device)


def whole_sets(job: Job, data: Prepared) -> list[Portion]:
    """The training and validation sets in batches of examples of similar length."""
    size = job.config.training.batch_size

    def portion(name: str, dataset: Dataset) -> Portion:
        order = np.argsort(-dataset.lengths, kind="stable")
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        return Portion(name, lambda: ([dataset[int(row)] for row in rows] for rows in batches), len(batches))

    return [portion(name, dataset) for name, dataset in {"train": data.train, **data.validation}.items()]


def frozen_model(job: Job, path: str | None) -> PreTrainedModel:
    """Another model, or a copy of the policy before training, without gradients."""
    settings = reference_settings(job.model, path)
    model = load_model(settings, "lm", job.dtype, job.device, stay=job.ranks.in_step).requires_grad_(False)
    job.distribute(model)
    job.capture(model, {})
    return model


def sequence_keys(pack: Pack, examples: list[Example]) -> np.ndarray:
    """For each sequence of a pack, a 64-bit hash of its tokens and targets, uint64 (S)."""
    keys = [
        hashlib.blake2b(np.asarray(ids, np.int32).tobytes() + trained.tobytes(), digest_size=8).digest()
        for ids, trained in sequences_of(pack, examples)
    ]
    return np.frombuffer(b"".join(keys), np.uint64)


def _precomputed(
    job: Job, score: Callable[[Pack], torch.Tensor], portion: Portion, key: str
) -> dict[str, torch.Tensor]:
    """A portion's keys (as int64) and log-probabilities, from the cache if possible."""
    folder = default_cache() / "reference" / key
    if not any(job.ranks.gather(bool(verify(folder)))):
        return load_tensors(folder / "logprob.safetensors")
    log.info("computing the reference's log-probabilities of %s, %d batches", portion.name, portion.count)
    keys, logprobs = [], []
    for examples in progress(portion.batches(), "reference log-probabilities", portion.count):
        packs = job.pack(examples)
        keys += [sequence_keys(pack, examples) for pack in packs]
        logprobs += [scored.cpu() for scored in job.scores(packs, score)]
    tensors = {"key": torch.from_numpy(np.concatenate(keys).view(np.int64)), "logprob": torch.cat(logprobs)}
    try:
        if job.ranks.local == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            save_folder(folder, 0, lambda temporary: save_tensors(temporary / "logprob.safetensors", tensors))
    except (OSError, RunError) as error:
        log.warning("the reference's log-probabilities could not be cached and are kept in memory only: %s", error)
    return tensors


def _key(job: Job, frozen: Scorer, data: Prepared) -> str:
    """The cache key, a hash of all inputs: the data's tokens, the reference's weights, the arithmetic."""
    with whole(frozen.model):  # a policy's adapter, which is trained, is excluded
        weights = {name: p for name, p in frozen.named_parameters() if not p.requires_grad}
        checksums = sorted(fingerprints(weights).items())
    facts = ("by sequence", data.fingerprint, job.config.seed, str(job.dtype), job.device.type, checksums)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


class Teacher:
    """The model to distill: another model, the policy before training (adapter off or initial, or a frozen copy), or
    the policy with the weights that a step begins with.

    Its prompts may differ from the student's. Raises ModelError if its tokenizer differs from the student's.
    """

    def __init__(self, job: Job, method: DistillMethod, policy: nn.Module):
        self._job, self._method = job, method
        if method.teacher is not None:
            self._refuse_other_tokenizer(job, method.teacher)
        is_policy = method.avoids_second_model or (method.teacher is None and is_adapted(policy))
        self.model = policy if is_policy else frozen_model(job, method.teacher)
        self._initial = policy if is_policy and is_adapted(policy) and method.refers_to_itself else None
        self._longest = longest_fed(job.config, positions_of(base_of(self.model).config))
        self._own = teacher_prompts(job.config, job.tokenizer, method, self._longest)
        self._reprompt = Reprompt(job.config, job.tokenizer, method.context_template)

    def check(self, data: Prepared) -> None:
        """Raise DataError for a training prompt without a prompt of the teacher's own that fits, or with a token id in
        the data's log-probabilities that is not one of the model's."""
        check_teacher(self._job.config, self._method, data, self._longest, self._own)
        if (column := self._method.teacher_logprobs) is None:
            return
        known = len(head_layer(self.model).weight)
        for example in map(data.train.__getitem__, range(len(data.train))):
            ids = (example.facts or {})["columns"][column]["logprob_token_ids"]
            if (largest := max(map(max, ids))) >= known:
                raise DataError(
                    f"row {example.row}, counted from 0: {column} has the token id {largest:,}, but the model's are "
                    f"below {known:,}: the teacher must have the student's tokenizer"
                )

    def taught(self, rollout: Rollout, contexts: Sequence[str | None] | None) -> list[Ids | None]:
        """The teacher's prompt of each completion, with its context if there are `contexts`; None for a completion
        without a context, or whose prompt then leaves no room for it."""
        prompts = [rollout.prompts[completion.group] for completion in rollout.completions]
        if contexts is None:
            own = self._own
            return [prompt.trees[0].tokens if own is None else own[0][prompt.row] for prompt in prompts]
        known = [(prompt, context) for prompt, context in zip(prompts, contexts, strict=True) if context is not None]
        written = iter(self._reprompt([(prompt.facts or {}, context) for prompt, context in known]))
        most = [self._longest - len(completion.tokens) for completion in rollout.completions]
        found = [None if context is None else next(written) for context in contexts]
        return [None if one is None or len(one) > room else one for one, room in zip(found, most, strict=True)]

    def top(self, rollout: Rollout) -> Top:
        """The log-probabilities in the data (R, K) of its completions' tokens."""
        rows: list[tuple[list[int], list[float]]] = []
        for completion in rollout.completions:
            given = (rollout.prompts[completion.group].facts or {})["columns"][self._method.teacher_logprobs]
            rows += [*zip(given["logprob_token_ids"], given["logprobs"], strict=True)][: len(completion.tokens)]
        most = max((len(ids) for ids, _ in rows), default=0)
        ids = [[*ids, *ids[:1] * (most - len(ids))] for ids, _ in rows]
        logprobs = [[*values, *[-math.inf] * (most - len(values))] for _, values in rows]
        return Top(torch.tensor(ids, device=self._job.device), torch.tensor(logprobs, device=self._job.device))

    @torch.no_grad()
    def outputs(self, rollout: Rollout, prompts: Sequence[Ids | None], part: RolloutPack) -> tuple[Head, Tensor]:
        """The head, and the last hidden states (N, D) that predict a rollout pack's scored tokens, in the pack's order.
        `prompts`: those of `taught`."""
        with as_at_start(self._initial) if self._initial is not None else nullcontext():
            temperature = self._job.config.rollout.temperature
            if not self._method.prompts_teacher:
                states_N = scored_states(self.model, part.pack)
                return Head.of(self.model, temperature), states_N  # a sharded head is whole after a pass
            index_R = torch.zeros(rollout.num_tokens, dtype=torch.long, device=part.token_N.device)
            index_R[part.token_N] = torch.arange(len(part.token_N), device=part.token_N.device)
            states_N = None
            job, size = self._job, self._job.config.training.tokens_per_pack
            for theirs in with_prompts(rollout, prompts).parts(part.completion_S, job.pack, size, job.feeds_last):
                theirs = theirs.to(self._job.device)
                states = scored_states(self.model, theirs.pack)
                states_N = states.new_empty(len(part.token_N), states.shape[1]) if states_N is None else states_N
                states_N[index_R[theirs.token_N]] = states
            assert states_N is not None
            return Head.of(self.model, temperature), states_N

    @staticmethod
    def _refuse_other_tokenizer(job: Job, path: str) -> None:
        ours, theirs = job.tokenizer.get_vocab(), load_tokenizer(reference_settings(job.model, path)).get_vocab()
        if ours == theirs:
            return
        differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ModelError(
            f"method.teacher {path} has a different tokenizer from {job.model.path}: {len(differ):,} tokens differ, "
            f"e.g. {differ[0]!r} (student: {ours.get(differ[0], 'none')}, teacher: {theirs.get(differ[0], 'none')}"
            "). Distillation compares probabilities token by token: use a teacher of the student's family, or "
            "train on the teacher's completions with method.type: sft (posttrain generate writes them)"
        )
