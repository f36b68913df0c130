"""The reference of preference methods: the policy with its adapter off, a frozen copy, precomputed numbers, or none."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from peft import PeftModel

from posttrain.batch import Example, Pack
from posttrain.config import DPOMethod
from posttrain.data import Dataset, Prepared
from posttrain.data.cache import default_folder
from posttrain.errors import ModelError, RunError
from posttrain.models.families import base_of
from posttrain.models.load import load_model
from posttrain.progress import progress
from posttrain.recipes.job import Job
from posttrain.recipes.vital import fingerprints
from posttrain.scoring import Scorer
from posttrain.store.checkpoint import save_folder, verify
from posttrain.store.files import load_tensors, save_tensors

log = logging.getLogger("posttrain")

# The log-probabilities (S) of a pack's sequences under the reference.
Reference = Callable[[Pack, list[Example]], torch.Tensor]


def make_reference(job: Job, method: DPOMethod, policy: Scorer, data: Prepared) -> tuple[Reference, Prepared]:
    """The reference that the settings ask for. When it is precomputed, the data comes back with its numbers."""
    if not method.use_ref_model:
        return lambda pack, examples: torch.zeros(pack.num_sequences, device=job.device), data
    if method.ref_model is None and isinstance(policy.model, PeftModel):
        frozen, adapter = policy, policy.model
    else:
        frozen, adapter = _frozen_model(job, method, policy), None

    @torch.no_grad()
    def score(pack: Pack) -> torch.Tensor:
        with adapter.disable_adapter() if adapter else nullcontext():
            return pack.sum_by_sequence(frozen(pack).logprob_N)

    if not method.precompute_ref_log_probs:
        return lambda pack, examples: score(pack), data
    tables = {"train": data.train, **data.validation}
    key = _key(job, frozen, data)
    numbered = {name: _precomputed(job, score, dataset, f"{key}-{name}") for name, dataset in tables.items()}
    return _look_up, replace(data, train=numbered.pop("train"), validation=numbered)


def _frozen_model(job: Job, method: DPOMethod, policy: Scorer) -> Scorer:
    """Another model, or the policy's own as it was before training, without gradients."""
    source = job.model if method.ref_model is None else job.model.model_copy(update={"path": method.ref_model})
    model = load_model(source, "lm", job.dtype, job.device).requires_grad_(False)
    ours, theirs = base_of(policy.model).config.vocab_size, model.config.vocab_size
    if ours != theirs:
        raise ModelError(f"method.ref_model {source.path} has {theirs} token ids, the policy {ours}: they must agree")
    return Scorer(model)


def _look_up(pack: Pack, examples: list[Example]) -> torch.Tensor:
    numbers = [examples[group].reference for group in pack.group_S[0::2].tolist()]
    return torch.tensor(numbers, dtype=torch.float32, device=pack.tokens_T.device).flatten()


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A data set whose examples know their reference log-probabilities."""

    dataset: Dataset
    numbers: np.ndarray  # (rows, 2): chosen, rejected

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Example:
        chosen, rejected = self.numbers[index].tolist()
        return replace(self.dataset[index], reference=(chosen, rejected))

    @property
    def lengths(self) -> np.ndarray:
        return self.dataset.lengths


def _precomputed(job: Job, score: Callable[[Pack], torch.Tensor], dataset: Dataset, key: str) -> _Numbered:
    """Score a data set once, longest rows together, or take the numbers from the cache."""
    folder = default_folder() / "reference" / key
    if not verify(folder):
        return _Numbered(dataset, load_tensors(folder / "logprob.safetensors")["logprob"].numpy())
    log.info("computing the reference's log-probabilities of %d rows", len(dataset))
    numbers = np.empty((len(dataset), 2), np.float32)
    order = np.argsort(-dataset.lengths, kind="stable")
    batches = [
        order[i : i + job.config.training.batch_size] for i in range(0, len(order), job.config.training.batch_size)
    ]
    for rows in progress(batches, "reference log-probabilities"):
        for pack in job.pack([dataset[int(row)] for row in rows]):
            owner = rows[pack.group_S[0::2].numpy()]
            numbers[owner] = score(pack.to(job.device)).view(-1, 2).cpu().numpy()
    tensors = {"logprob": torch.from_numpy(numbers)}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_folder(folder, 0, lambda temporary: save_tensors(temporary / "logprob.safetensors", tensors))
    except (OSError, RunError) as error:
        log.warning("the reference's log-probabilities could not be cached, and are used all the same: %s", error)
    return _Numbered(dataset, numbers)


def _key(job: Job, frozen: Scorer, data: Prepared) -> str:
    """Names the cached numbers by what they depend on: the data as tokens, the reference's weights, the arithmetic."""
    facts = (
        data.fingerprint,
        job.config.seed,
        str(job.dtype),
        job.device.type,
        sorted(fingerprints(_weights(frozen)).items()),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _weights(scorer: Scorer) -> dict[str, torch.Tensor]:
    return {name: p for name, p in scorer.named_parameters() if "lora_" not in name}
