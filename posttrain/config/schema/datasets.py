"""Known data sets: short names, hub ids and column mappings."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A data set on the hub. `source` is its hub id: owner/name or owner/name/subset, with the default subset.

    `columns` maps the fields of `format` to the data's columns, and `splits` maps train and test to the data set's
    splits. `files` lists the files of a split if the repository does not.
    """

    source: str
    about: str
    columns: dict[str, str] = field(default_factory=dict)
    format: str = "problem_answer"
    splits: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def repo(self) -> str:
        """owner/name."""
        return "/".join(self.source.split("/")[:2])

    @property
    def subset(self) -> str | None:
        """The default subset."""
        return self.source.removeprefix(self.repo)[1:] or None


KNOWN: dict[str, KnownSet] = {
    "hh-rlhf": KnownSet("Anthropic/hh-rlhf", "pairs of helpful and harmless dialogues", format="hh"),
    "ultrafeedback": KnownSet(
        "trl-lib/ultrafeedback_binarized", "instructions; pairs ranked by GPT-4", format="preference"
    ),
    "orca-dpo-pairs": KnownSet(
        "HuggingFaceH4/orca_dpo_pairs",
        "OpenOrca instructions with pairs of replies",
        format="preference",
        splits={"train": "train_prefs", "test": "test_prefs"},
    ),
    "stack-exchange-paired": KnownSet(
        "lvwerra/stack-exchange-paired",
        "Stack Exchange questions; pairs ranked by votes",
        {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        "preference",
        files={"train": "data/rl/*.parquet", "test": "data/evaluation/*.parquet"},
    ),
    "openmathreasoning-mini": KnownSet(
        "unsloth/OpenMathReasoning-mini",
        "competition problems with long reasoning",
        {"solution": "generated_solution", "answer": "expected_answer"},
        splits={"train": "cot"},
    ),
    "dapo-math-17k": KnownSet(
        "open-r1/DAPO-Math-17k-Processed/en",
        "competition problems with a short answer, no working",
        {"problem": "prompt", "answer": "solution"},
    ),
    "gsm8k": KnownSet("openai/gsm8k/main", "grade-school word problems with working", {"problem": "question"}),
    "math": KnownSet("DigitalLearningGmbH/MATH-lighteval/default", "competition problems of five levels with working"),
    "math-500": KnownSet("HuggingFaceH4/MATH-500", "500 test problems of MATH: only a test split"),
    "openmathreasoning": KnownSet(
        "nvidia/OpenMathReasoning",
        "competition problems with long reasoning, 50 GB; splits are fetched one by one",
        {"solution": "generated_solution", "answer": "expected_answer"},
        files={"train": "data/cot-*"} | {name: f"data/{name}-*" for name in ("cot", "tir", "genselect")},
    ),
    "aime24": KnownSet(
        "HuggingFaceH4/aime_2024", "30 problems of the AIME 2024: for testing", splits={"test": "train"}
    ),
    "aime25": KnownSet("math-ai/aime25", "30 problems of the AIME 2025: for testing"),
    "amc": KnownSet(
        "AI-MO/aimo-validation-amc",
        "83 problems from the AMC 12 in 2022 and 2023: for testing",
        splits={"test": "train"},
    ),
    "minerva-math": KnownSet("math-ai/minervamath", "272 university problems: for testing", {"problem": "question"}),
    "olympiadbench": KnownSet(
        "Hothan/OlympiadBench/OE_TO_maths_en_COMP",
        "674 olympiad problems in English, text only: for testing",
        {"problem": "question", "answer": "final_answer"},
        splits={"test": "train"},
    ),
    "svamp": KnownSet(
        "MU-NLPC/Calc-svamp/default",
        "1,000 simple word problems: for testing",
        {"problem": "question", "answer": "result"},
    ),
}


def name_of(known: KnownSet | None) -> str | None:
    """The short name of a known set; None for None."""
    return next((name for name, entry in KNOWN.items() if entry == known), None)


def known_set(source: str) -> KnownSet | None:
    """The known set that a `source` names: by its short name, or by its hub id with or without a subset."""
    if source in KNOWN:
        return KNOWN[source]
    repo = "/".join(source.split("/")[:2]).lower()
    return next((known for known in KNOWN.values() if known.repo.lower() == repo), None)
