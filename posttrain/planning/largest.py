"""The step of a run that needs most memory, found from the lengths of its examples."""

import logging
import math
from dataclasses import replace
from functools import partial

import numpy as np

from posttrain.batch import Example, Node, Pack, pack
from posttrain.config import RunConfig
from posttrain.data import Prepared
from posttrain.models.attention import width_step
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import estimate
from posttrain.recipes.reference_free import pack_with_chosen_prompts, scores_prompts
from posttrain.training.job import Job
from posttrain.training.loop import epoch_order

log = logging.getLogger("posttrain")

CANDIDATES = 8  # the steps with most tokens are packed to find the fullest pack


def first_epoch(config: RunConfig, size: int) -> list[np.ndarray]:
    """The rows of each step of the first epoch, in the loop's order."""
    order = epoch_order(config, size, 0)
    batch = config.training.batch_size
    steps = math.ceil(size / batch)
    taken = min(steps, config.training.max_steps or steps)
    return [order[step * batch : (step + 1) * batch] for step in range(taken)]


def pack_rows(
    config: RunConfig,
    data: Prepared,
    rows: np.ndarray,
    tokens_per_pack: int,
    pad_to: int | None = None,
    ranks: int = 1,
    feeds_last: bool = False,
) -> list[Pack]:
    """The packs of a step, those of all ranks, as in the method's recipe. `feeds_last`: as `Job.feeds_last`."""
    examples = [data.train[int(row)] for row in rows]
    if config.method.samples_completions:
        length = config.rollout.max_completion_length
        examples = [
            e
            for one in examples
            for e in with_completions(one, config.method.completions_per_prompt, length, tokens_per_pack, feeds_last)
        ]
    keep_last = feeds_last or config.method.head == "reward"
    pack_of = partial(pack, tokens_per_pack=tokens_per_pack, keep_last=keep_last, pad_to=pad_to, ranks=ranks)
    return pack_with_chosen_prompts(pack_of, examples) if scores_prompts(config.method) else pack_of(examples)


def with_completions(
    prompt: Example, n: int, length: int, tokens_per_pack: int, feeds_last: bool = False
) -> list[Example]:
    """A prompt with `n` completions of maximum length, divided into examples as in a rollout."""
    tree = prompt.trees[0]
    leaf = Node(np.zeros(length, np.int64), trained=True)
    each = max(1, (tokens_per_pack - len(tree.tokens)) // max(length - int(not feeds_last), 1))
    whole, rest = divmod(n, each)
    counts = [each] * whole + [rest] * (rest > 0)
    return [replace(prompt, trees=(replace(tree, children=(leaf,) * count),)) for count in counts]


def largest_step(
    config: RunConfig,
    data: Prepared,
    tokens_per_pack: int,
    pad_to: int | None = None,
    ranks: int = 1,
    feeds_last: bool = False,
) -> list[Pack]:
    """The packs of that step of the first epoch which has the fullest pack; the fullest comes first."""
    steps = sorted(first_epoch(config, len(data.train)), key=lambda rows: -int(data.train.lengths[rows].sum()))
    packed = [pack_rows(config, data, rows, tokens_per_pack, pad_to, ranks, feeds_last) for rows in steps[:CANDIDATES]]
    largest = max(packed, key=lambda packs: max(map(_weight, packs)))
    return sorted(largest, key=_weight, reverse=True)


def keeps_engine(job: Job, data: Prepared) -> bool:
    """Whether a GPU has room for the engine's memory during the largest update (planning/estimate.py)."""
    if job.device.type != "cuda" or job.config.rollout.engine != "embedded":
        return True  # a CPU engine keeps nothing, and vLLM's settings limit its memory
    size = job.config.training.tokens_per_pack
    ranks = job.ranks.size
    packs = largest_step(job.config, data, size, width_step(job.device, size), ranks, job.feeds_last)
    found = estimate(job.config, job.model, empty_model(job.config, job.model), packs, job.device, ranks=ranks)
    if not found.keeps_engine:
        log.warning(
            "the GPU has no room for completions' keys and values during an update: they are reallocated every step, "
            "which takes time; a smaller training.tokens_per_pack leaves room"
        )
    return found.keeps_engine


def _weight(pack: Pack) -> tuple[int, int]:
    return len(pack.tokens_T), len(pack.target_N)
