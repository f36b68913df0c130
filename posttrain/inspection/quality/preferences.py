"""Preference pairs: whether the length of a reply tells which one is preferred, and the margins of a reward model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.base.errors import ConfigError
from posttrain.base.progress import progress
from posttrain.base.threads import sharing_cores
from posttrain.config import ModelConfig
from posttrain.config.schema.run import RunConfig
from posttrain.data import Options, prepare
from posttrain.evaluation.pairs import BATCH, own_margins
from posttrain.evaluation.statistics import Estimate, mean_by_prompt
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.families import check_longest
from posttrain.models.load import check_embeddings, is_reward_model, load_model, load_tokenizer


@dataclass(frozen=True, slots=True)
class LengthBias:
    """`longer`: the share of pairs in which the longer reply is chosen, with its interval, clustered by prompt.

    `auc`: the probability that a random chosen reply is longer than a random rejected one, ties counted half.
    """

    pairs: int
    equal: int  # of the same length; not in `longer`
    longer: Estimate | None
    auc: float
    chosen_mean: float
    rejected_mean: float


def length_bias(chosen: np.ndarray, rejected: np.ndarray, prompts: Sequence[int] | np.ndarray) -> LengthBias:
    """From the numbers of tokens of both replies of each pair, and a key of its prompt."""
    by_prompt: dict[int, list[float]] = {}
    for one, other, prompt in zip(chosen.tolist(), rejected.tolist(), map(int, prompts), strict=True):
        if one != other:
            by_prompt.setdefault(prompt, []).append(float(one > other))
    longer = mean_by_prompt(list(by_prompt.values())) if by_prompt else None
    equal = int((chosen == rejected).sum())
    return LengthBias(len(chosen), equal, longer, auc(chosen, rejected), float(chosen.mean()), float(rejected.mean()))


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """P(positive > negative) + P(equal) / 2, the area under the ROC curve (Mann-Whitney)."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left") + np.searchsorted(ordered, positive, side="right")
    return float(below.sum() / (2 * len(positive) * len(negative)))


@sharing_cores()
def margins_of(config: RunConfig, path: str) -> tuple[np.ndarray, np.ndarray]:
    """The row numbers of the training pairs, without ties, and chosen's reward minus rejected's.

    Rows held out for validation are scored, too; rows have the reward model's own tokens. Raises ConfigError if the
    method trains on no pairs, or the model is no reward model.
    """
    if config.method.kind != "pair":
        raise ConfigError(f"--reward-model judges preference pairs; method {config.method.type} has none")
    model = ModelConfig(path=path)
    if not is_reward_model(model):
        raise ConfigError(f"--reward-model {path}: is not a reward model, which `posttrain train method=reward` trains")
    tokenizer = load_tokenizer(model)
    data = config.data.model_copy(update={"validation": None, "excluded": ()})
    dataset = prepare(data, tokenizer, "pair", Options(seed=config.seed)).train
    device = take_device(config.devices)
    loaded = load_model(model, "reward", compute_dtype(model, device), device)
    check_longest(loaded.config, dataset.longest)
    check_embeddings(loaded, tokenizer, path)
    _, once = np.unique(dataset.rows, return_index=True)  # a source with a weight has rows several times
    once = once[~dataset.ties[once]]
    once = once[np.argsort(-dataset.lengths[once], kind="stable")]
    score, found = own_margins(loaded, device), []
    for start in progress(range(0, len(once), BATCH), "scoring pairs"):
        found += score([dataset[int(index)] for index in once[start : start + BATCH]])
    order = np.argsort(dataset.rows[once], kind="stable")
    return dataset.rows[once][order], np.array(found)[order]
