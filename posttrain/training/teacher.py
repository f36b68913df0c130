"""The teacher of a distillation: it predicts the tokens of the student's completions, given its own prompts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.config import DistillMethod
from posttrain.data.prepare import prompts_with_system
from posttrain.errors import ModelError
from posttrain.models.families import is_adapted
from posttrain.models.load import load_tokenizer
from posttrain.models.lora import as_begun
from posttrain.rollout import Rollout, RolloutPack
from posttrain.scoring import scored_states
from posttrain.training.inputs import reference_settings
from posttrain.training.job import Job
from posttrain.training.reference import frozen_model


class Teacher:
    """Another model, or the policy as it was before training: with its adapter off or as it began, or a frozen copy.

    With `teacher_system_prompt` its prompt differs from the student's. Raises ModelError for a model with another
    tokenizer.
    """

    def __init__(self, job: Job, method: DistillMethod, policy: nn.Module):
        self._job, system = job, method.teacher_system_prompt
        self._prompts = None if system is None else prompts_with_system(job.config, job.tokenizer, system)
        self._adapter = policy if method.teacher is None and is_adapted(policy) else None
        if method.teacher is not None:
            self._refuse_other_tokenizer(job, method.teacher)
        self.model = self._adapter or frozen_model(job, method.teacher)

    @torch.no_grad()
    def states(self, rollout: Rollout, part: RolloutPack) -> Tensor:
        """The last hidden states (N, D) that predict the scored tokens of a pack of the rollout, in its order."""
        with as_begun(self._adapter) if self._adapter else nullcontext():
            if self._prompts is None:
                return scored_states(self.model, part.pack)
            return self._after_own_prompts(rollout, part, self._prompts)

    def _after_own_prompts(self, rollout: Rollout, part: RolloutPack, prompts: Mapping[int, np.ndarray]) -> Tensor:
        asked = [replace(p, trees=(replace(p.trees[0], tokens=prompts[p.row]),)) for p in rollout.prompts]
        place_R = torch.zeros(rollout.num_tokens, dtype=torch.long, device=part.token_N.device)
        place_R[part.token_N] = torch.arange(len(part.token_N), device=part.token_N.device)
        found = None
        job, size = self._job, self._job.config.training.tokens_per_pack
        for theirs in replace(rollout, prompts=asked).parts(part.completion_S, job.pack, size, job.feeds_last):
            theirs = theirs.to(self._job.device)
            states = scored_states(self.model, theirs.pack)
            found = states.new_empty(len(part.token_N), states.shape[1]) if found is None else found
            found[place_R[theirs.token_N]] = states
        assert found is not None
        return found

    @staticmethod
    def _refuse_other_tokenizer(job: Job, path: str) -> None:
        ours, theirs = job.tokenizer.get_vocab(), load_tokenizer(reference_settings(job.model, path)).get_vocab()
        if ours == theirs:
            return
        differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ModelError(
            f"method.teacher {path} has another tokenizer than {job.model.path}: {len(differ):,} tokens differ, such "
            f"as {differ[0]!r} ({ours.get(differ[0], 'none')} in the student's, {theirs.get(differ[0], 'none')} in the "
            "teacher's). Distillation compares probabilities token by token: use a teacher of the student's family, or "
            "train on the teacher's completions with method.type: sft (posttrain generate writes them)"
        )
