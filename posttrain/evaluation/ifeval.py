"""IFEval's checks of instructions, with lm-eval's copy of the authors' code.

Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models" (arXiv 2311.07911).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from posttrain.base.imports import need
from posttrain.grading.verdict import BadGold, Judgement

# The checks of these instructions use NLTK's punkt_tab, which NLTK downloads.
NEEDS_PUNKT = frozenset({"length_constraints:number_sentences", "length_constraints:nth_paragraph_first_word"})
MODULES = ("langdetect", "immutabledict", "nltk", "lm_eval.tasks.ifeval.instructions_registry")


def package(name: str) -> ModuleType:
    """Import a package of the `ifeval` extra. Raises ConfigError if it is missing."""
    return need(name, "ifeval", "suite ifeval")


def warm_up() -> None:
    """Import the packages before a worker is isolated, because they cannot read files afterwards."""
    for name in (*MODULES, "lm_eval.tasks.ifeval.utils"):
        package(name)
    package("langdetect").detect("a language")  # loads its profiles
    _has_punkt()


@lru_cache(maxsize=1)
def _has_punkt() -> bool:
    try:
        package("nltk").data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True


def check(gold: str | None, instructions: Sequence[str], kwargs: Sequence[Any], prompt: str) -> None:
    """Raise BadGold if an instruction is unknown or cannot be checked on this machine."""
    known = package("lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT
    unknown = [name for name in instructions if name not in known]
    if unknown:
        raise BadGold(f"there is no check for {', '.join(unknown)}")
    if not _has_punkt() and (names := NEEDS_PUNKT & {*instructions}):
        raise BadGold(f"{', '.join(sorted(names))} needs NLTK's punkt_tab: python -m nltk.downloader punkt_tab")


def followed(
    completion: str, gold: str | None, instructions: Sequence[str], kwargs: Sequence[Mapping[str, Any]], prompt: str
) -> Judgement:
    """Whether all instructions are followed (strict); `parts` has the result for each instruction."""
    package("langdetect").DetectorFactory.seed = 0  # otherwise the detected language of a short string varies
    checks = package("lm_eval.tasks.ifeval.utils")
    example = checks.InputExample(
        key=0, instruction_id_list=list(instructions), prompt=prompt, kwargs=list(map(dict, kwargs))
    )
    result = checks.test_instruction_following_strict(example, completion)
    followed = zip(instructions, result.follow_instruction_list, strict=True)
    parts = {f"{index} {name}": float(right) for index, (name, right) in enumerate(followed)}
    return Judgement(float(result.follow_all_instructions), result.follow_all_instructions, None, parts)
