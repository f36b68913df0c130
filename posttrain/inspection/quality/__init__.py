"""Data quality before a run: duplicates, overlap, contamination, length bias, label noise (docs/data.md)."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.config.schema.run import RunConfig
from posttrain.data import Prepared
from posttrain.data.prepare import rows_of_run
from posttrain.inspection.quality.contamination import Questions, contamination, questions_of
from posttrain.inspection.quality.noise import label_noise
from posttrain.inspection.quality.preferences import margins_of
from posttrain.inspection.quality.report import Quality, bias_of, duplicates
from posttrain.inspection.quality.texts import read_corpus

NGRAMS = (13, 8)

__all__ = ["NGRAMS", "Quality", "Questions", "check_quality", "questions_of"]


def check_quality(
    config: RunConfig,
    prepared: Prepared,
    tokenizer: PreTrainedTokenizerBase,
    *,
    against: Sequence[str] = (),
    n: int = 13,
    reward_model: str | None = None,
) -> Quality:
    """All findings about the rows that train or validate.

    `against` names suites or files whose questions are looked for, by default the built-in suites in the local cache.
    Raises a PosttrainError for one that cannot be read, and for a model that cannot score the pairs.
    """
    questions, missing = questions_of(against)  # an error here comes before long work
    rows, margins, noise = (), (), None
    if reward_model is not None:
        rows, margins = (found.tolist() for found in margins_of(config, reward_model))
        try:
            noise = label_noise(margins)
        except ValueError as error:
            raise DataError(f"--reward-model {reward_model}: {error}") from error
    corpus = read_corpus(rows_of_run(config, tokenizer), prepared)
    found = [contamination(one, corpus, n) for one in questions]
    lines = duplicates(corpus)
    return Quality(corpus, lines, found, missing, n, bias_of(prepared, corpus), noise, rows, margins)
