"""Margins of a reward model on a run's preference pairs."""

from __future__ import annotations

import numpy as np

from posttrain.config import ModelConfig
from posttrain.config.schema.run import RunConfig
from posttrain.data import prepare
from posttrain.errors import ConfigError
from posttrain.inspection.pairs import BATCH, own_margins
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.families import check_longest
from posttrain.models.load import check_embeddings, is_reward_model, load_model, load_tokenizer
from posttrain.progress import progress
from posttrain.threads import sharing_cores


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
    dataset = prepare(data, tokenizer, "pair", seed=config.seed).train
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
