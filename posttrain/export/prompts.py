"""The prompts on which an exported model is compared with the trained one: the user's, the run's, or built-in ones."""

import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import DataError, PosttrainError
from posttrain.base.words import counted
from posttrain.config import DataConfig, RunConfig
from posttrain.config.schema.run import BEHAVIOR_VERSION
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.readers import Record, read_files
from posttrain.inspection.sample import Setup, first_prompts
from posttrain.models.families import positions_of

log = logging.getLogger("posttrain")

PROMPTS, TOKENS = 8, 512  # prompts, and tokens of each that are compared
BUILT_IN = (
    "Once upon a time, a fox and a crow lived at the edge of a dark forest. One winter the fox",
    "Explain in two sentences why the sky is blue during the day and red at sunset.",
    "A train leaves at 9:40 and arrives at 13:05. How many minutes does the journey take? Show your working.",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "Translate into German and French: 'The library closes at six, but the café stays open until nine.'",
    "Dear Ms Okafor, thank you for your letter of 12 March. I am writing to confirm that",
    "List three differences between a virus and a bacterium, each with an example.",
    "Solve for x: 3(x - 4) + 7 = 2x + 11. Then check your answer by substitution.",
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of each prompt, and where they come from, in words."""

    tokens: list[list[int]]
    origin: str

    @property
    def compared(self) -> str:
        """The prompts in words."""
        tokens = counted(sum(map(len, self.tokens)), "token")
        return f"{counted(len(self.tokens), 'prompt')} of {tokens}, {self.origin}"


def prompts_for(
    file: Path | None, config: RunConfig | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Prompts:
    """The first prompts of `file`, or else of the run's own data, or else built-in ones.

    Raises DataError if `file` has no usable prompt.
    """
    longest = min(TOKENS, positions_of(model.config) or TOKENS)
    plain = DataConfig(source="builtin", template="chat" if tokenizer.chat_template else "none")
    version = config.behavior_version if config else BEHAVIOR_VERSION
    if file is not None:
        records = list(itertools.islice(read_files((file,)), 4 * PROMPTS))
        data = config.data.model_copy(update={"format": "auto", "columns": {}}) if config else plain
        found = prompts_of(records, data, tokenizer, str(file), version)
        good = [one for one in found if isinstance(one, Prompt)][:PROMPTS]
        if not good:
            raise DataError(f"{file} has no usable prompt among its first {len(records)} rows: {found[0]}")
        return Prompts([one.tokens[:longest] for one in good], file.name)
    if config is not None:
        setup = Setup(config.models[0], config.data, (), config.rollout, config.devices, None, config.seed, version)
        try:
            own, _ = first_prompts(setup, model, tokenizer, PROMPTS)
            return Prompts([one.tokens[:longest] for one in own], "the run's data")
        except PosttrainError as error:
            log.info("the run's own prompts cannot be read (%s): built-in ones are compared", error)
    return Prompts([one.tokens[:longest] for one in built_in(plain, tokenizer)], "built-in prompts")


def built_in(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The usable built-in prompts, by the settings of `data`."""
    records = [Record(row, "built-in", row + 1, {"prompt": text}) for row, text in enumerate(BUILT_IN)]
    found = prompts_of(records, data, tokenizer, "built-in prompts")
    return [one for one in found if isinstance(one, Prompt)]
