"""The engine that uses transformers' `generate`: slower, but for any architecture that transformers can generate with.

Sampling, random streams, limits and stops are the same as in the other engines: `generate` runs the model and the
cache, and a logits processor samples the token and masks all others.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from posttrain.base.imports import replaced
from posttrain.engines.embedded import evaluating
from posttrain.engines.protocol import Completed, Completion, Engine, Finished, Request, Sampling, StopTexts, in_batches
from posttrain.engines.sampling import keys, sample_tokens, token_words
from posttrain.models.attention import NAME as PACKED
from posttrain.models.families import base_of, logit_softcap, positions_of


class TransformersEngine(Engine):
    """Engine (see protocol.py) that calls transformers' `generate` with left-padded prompts, for at most `max_rows`
    completions at a time.

    A policy with `packed` attention is switched to transformers' attention for the call, and back afterwards.
    """

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        version: int = 0,
        max_rows: int = 256,
    ):
        self.tokenizer, self.max_rows = tokenizer, max_rows
        self.load(policy, version)

    def _completed(self, requests: list[Request], sampling: Sampling, finished: Finished | None) -> Completed:
        base, texts = base_of(self.policy), StopTexts(sampling.stop, self.tokenizer)
        batches = _batches(requests, max(1, self.max_rows // sampling.num_generations), positions_of(base.config))
        # Without the model's generation defaults (penalties, stop tokens): only the given settings apply.
        plain = replaced(base, "generation_config", GenerationConfig())
        with torch.inference_mode(), evaluating(self.policy), _own_attention(base), plain:
            return in_batches(batches, lambda batch: self._batch(base, batch, sampling, texts), finished)

    def _batch(
        self, base: PreTrainedModel, requests: Sequence[Request], sampling: Sampling, texts: StopTexts
    ) -> Completed:
        n, device = sampling.num_generations, base.device
        width = max(len(request.tokens) for request in requests)
        prompts = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(prompts)
        for row, request in enumerate(requests):
            prompts[row, width - len(request.tokens) :] = torch.as_tensor(request.tokens)
            mask[row, width - len(request.tokens) :] = 1
        sampler = _Sampler(requests, sampling, texts, device)
        base.generate(
            input_ids=prompts.repeat_interleave(n, 0).to(device),  # pyright: ignore
            attention_mask=mask.repeat_interleave(n, 0).to(device),
            generation_config=GenerationConfig(
                max_new_tokens=max(max(request.limits) for request in requests), do_sample=False, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([lambda *_, **_unused: sampler.done_B]),
        )
        rows = sampler.completions(self.version)
        return [rows[start : start + n] for start in range(0, len(rows), n)]


def _batches(requests: Sequence[Request], at_once: int, positions: int | None) -> Iterator[Sequence[Request]]:
    """Yield batches of up to `at_once` prompts, or of one if finished rows would exceed the model's positions."""
    for start in range(0, len(requests), at_once):
        batch = requests[start : start + at_once]
        steps, longest = max(max(request.limits) for request in batch), max(len(request.tokens) for request in batch)
        if positions is None or longest + steps - 1 <= positions:
            yield batch
        else:
            yield from ([request] for request in batch)


class _Sampler(LogitsProcessor):
    """Samples each row's token, stores it with its log-probability, and masks all other tokens for `generate`."""

    def __init__(self, requests: Sequence[Request], sampling: Sampling, texts: StopTexts, device: torch.device):
        self.sampling = sampling
        prompts = (request.tokens for request in requests for _ in request.limits)
        self.searches = [texts.search(tokens) for tokens in prompts] if texts else []
        streams = [(request.seed, number) for request in requests for number in range(sampling.num_generations)]
        self.key_B2 = keys(streams, device)
        self.limit_B = torch.tensor([limit for request in requests for limit in request.limits], device=device)
        self.stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        self.words_V: Tensor | None = None
        self.tokens: list[Tensor] = []  # one tensor (B) per step
        self.logprobs: list[Tensor] = []
        self.count_B = torch.zeros_like(self.limit_B)  # tokens of each row, until it is done
        self.stopped_B = torch.zeros_like(self.limit_B, dtype=torch.bool)
        self.done_B = torch.zeros_like(self.stopped_B)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float()
        if self.words_V is None:
            self.words_V = token_words(scores.shape[-1], scores.device)
        position_B = torch.full_like(self.count_B, len(self.tokens))
        token_B, logprob_B = sample_tokens(scores.clone(), self.sampling, self.words_V, self.key_B2, position_B)
        self.tokens.append(token_B)
        self.logprobs.append(logprob_B)
        self.count_B += ~self.done_B
        stopped_B = (token_B[:, None] == self.stops).any(1)
        for row in (~self.done_B).nonzero().squeeze(1).tolist() if self.searches else ():
            search = self.searches[row]
            stopped_B[row] |= search is not None and search.add(int(token_B[row]))
        self.stopped_B |= stopped_B & ~self.done_B
        self.done_B |= stopped_B | (self.count_B >= self.limit_B)
        return torch.full_like(scores, -torch.inf).scatter_(1, token_B[:, None], 0.0)

    def completions(self, version: int) -> list[Completion]:
        of_rows = torch.stack(self.tokens, 1), torch.stack(self.logprobs, 1), self.count_B, self.stopped_B
        return [
            Completion(tokens[:count], logprobs[:count], "stop" if stopped else "length", version)
            for tokens, logprobs, count, stopped in zip(*(x.tolist() for x in of_rows), strict=True)
        ]


@contextlib.contextmanager
def _own_attention(base: PreTrainedModel) -> Iterator[None]:
    """Context with transformers' attention instead of `packed`; models with capped logits need its eager variant."""
    if base.config._attn_implementation != PACKED:
        yield
        return
    capped = getattr(base.config, "attn_logit_softcapping", None) or logit_softcap(base.config)
    base.set_attn_implementation("eager" if capped else "sdpa")
    try:
        yield
    finally:
        base.set_attn_implementation(PACKED)
