"""lm-eval's requests to a model, as token ids, for posttrain's scorer and engines. lm_eval_model.py has the strings.

A context is computed once for all its continuations, and a prompt once for all its completions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.console import counter, progress
from posttrain.base.errors import ConfigError, DataError
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.batch import Example, Node, Pack
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.engines import Engine, Sampling, make_engine, seed_of, stop_token_ids
from posttrain.evaluation.answering import Reply
from posttrain.models.families import positions_of
from posttrain.scoring import Scorer, of_sequences

PACK_TOKENS = 8192
CONTINUATIONS_AT_ONCE = 256  # continuations scored between two updates of the progress bar
NO_LIMIT = 2048  # positions assumed for a model without a limit, as in lm-eval
SAMPLED = {"temperature", "top_p", "top_k", "min_p"}  # lm-eval's generation settings that engines support

Pair = tuple[list[int], list[int]]


class Requests(ExitStack):
    """Scores continuations and completes prompts with a model, all as token ids. On exit, closes the engine."""

    def __init__(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig, seed: int):
        super().__init__()
        self.policy, self.tokenizer, self.rollout, self.seed = policy, tokenizer, rollout, seed
        self.positions = positions_of(policy.config) or NO_LIMIT
        self.stops = stop_token_ids(policy, tokenizer)
        self._scorer = Scorer(policy)

    @cached_property
    def engine(self) -> Engine:
        """The engine, created when the first prompt is completed: tasks that only score need none."""
        engine = make_engine(self.rollout.engine, self.policy, self.tokenizer, vllm=self.rollout.vllm)
        self.callback(engine.close)
        return engine

    def logprobs(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The log-probability (nats) of each continuation after its context, and whether greedy decoding gives it.

        A context that is too long loses its first tokens. Raises DataError if there is no context, or if a continuation
        is longer than the model's positions.
        """
        scores = [(0.0, True)] * len(pairs)
        pairs = [self._fitting(*pair) for pair in pairs]
        # Continuations of one context are adjacent, so that they share a pack.
        order = [i for i in sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), pairs[i])) if pairs[i][1]]
        for start in progress(range(0, len(order), CONTINUATIONS_AT_ONCE), "scoring continuations"):
            block = order[start : start + CONTINUATIONS_AT_ONCE]
            examples = [Example((Node(pairs[i][0], children=(Node(pairs[i][1], trained=True),)),), i) for i in block]
            room = max(PACK_TOKENS, *(len(pairs[i][0]) + len(pairs[i][1]) for i in block))
            found = of_sequences(examples, self._scored, self.policy.device, room)
            for index, [score] in zip(block, found, strict=True):
                scores[index] = score
        return scores

    def _scored(self, packed: Pack) -> Iterator[tuple[float, bool]]:
        scores, lengths = self._scorer(packed), packed.length_S.tolist()
        for logprobs, top1 in zip(scores.logprob_N.split(lengths), scores.top1_N.split(lengths), strict=True):
            yield float(logprobs.double().sum()), bool(top1.all())

    def _fitting(self, context: list[int], continuation: list[int]) -> Pair:
        if not context:
            raise DataError(f"the continuation {continuation[:8]} has no context: give at least one token")
        if len(continuation) > self.positions:
            raise DataError(
                f"a continuation has {len(continuation):,} tokens, but the model {self.positions:,} positions"
            )
        return context[-(self.positions + 1 - len(continuation)) :], continuation

    def complete(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[list[Reply]]:
        """Completions of each prompt. A prompt that leaves no room for a whole completion loses its first tokens."""
        room = self.positions - sampling.max_completion_length
        if room < 1:
            raise ConfigError(
                f"completions of {sampling.max_completion_length:,} tokens leave no room for a prompt: the model has "
                f"{self.positions:,} positions; lower the task's max_gen_toks"
            )
        cut = sum(len(prompt) > room for prompt in prompts)
        if cut:
            log.warning("%s truncated on the left to %s", counted(cut, "prompt"), counted(room, "token"))
        prompts = [prompt[-room:] for prompt in prompts]
        seeds = [seed_of(self.seed, index) for index in range(len(prompts))]
        with counter("generating for lm-eval", len(prompts)) as count:
            groups = self.engine.generate(prompts, sampling, seeds=seeds, finished=lambda *_: count())
        made = zip(prompts, groups, strict=True)
        return [[Reply.of(one, self.stops, self.tokenizer, prompt) for one in group] for prompt, group in made]

    def sampling(self, settings: Mapping[str, Any], count: int) -> Sampling:
        """Convert lm-eval's normalised generation settings for engines. Raises ConfigError for unsupported ones."""
        unknown = sorted(settings.keys() - SAMPLED - {"do_sample", "until", "max_gen_toks"})
        if unknown:
            raise ConfigError(
                f"the task's generation_kwargs have {', '.join(unknown)}, which engines do not support: they support "
                f"{', '.join(sorted(SAMPLED))}, until, max_gen_toks and do_sample"
            )
        return Sampling(
            **{name: value for name, value in settings.items() if name in SAMPLED - {"temperature"}},
            temperature=float(settings.get("temperature", 1.0)) if settings["do_sample"] else 0.0,
            max_completion_length=settings["max_gen_toks"],
            num_generations=count,
            stop_token_ids=self.stops,
            stop=tuple(text for text in settings["until"] if text),
            seed=self.seed,
        )
