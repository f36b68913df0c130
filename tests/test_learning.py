"""Methods learn what their labels say, on a task of seconds: to show the working of a sum, or to leave it out.

From random weights, so that it takes no time; from a model that SFT has taught, over three seeds: `make learn`
(docs/learning.md).
"""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import functional, runner
from posttrain.config import load
from posttrain.data import arithmetic_problems
from posttrain.quickstart.model import TAGS, make_model, turns
from posttrain.runs.files import load_json

WORKED, BARE = f"{TAGS.reasoning_start}{{solution}}", TAGS.reasoning_start
ANSWER = f"{TAGS.reasoning_end}{TAGS.solution_start}{{answer}}{TAGS.solution_end}"
COMMON = [
    "data.template=tags",
    "training.batch_size=8",
    "training.tokens_per_pack=2048",
    "training.learning_rate=1e-3",
    "devices.type=cpu",
]
PREFERENCE = {
    "dpo": ["method.type=dpo"],
    "kto": ["method.type=kto"],
    "orpo": ["method.type=orpo", "method.beta=1.0", "method.completion_only_loss=true"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A model with random weights, and pairs of a reply with its working (chosen) and one without."""
    folder = tmp_path_factory.mktemp("learning")
    make_model(folder / "model", seed=0)
    for split, count in (("train", 240), ("test", 50)):
        rows = list(arithmetic_problems(split, count, seed=0))
        pairs = [
            {"prompt": r["problem"], "chosen": (WORKED + ANSWER).format(**r), "rejected": (BARE + ANSWER).format(**r)}
            for r in rows
        ]
        write(folder / f"{split}-true.jsonl", pairs)
        turned = [pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]
        write(folder / f"{split}-turned.jsonl", turned)
        for labels, labelled in (("true", pairs), ("turned", turned)):
            write(folder / f"{split}-{labels}-kto.jsonl", [row for pair in labelled for row in one_by_one(pair)])
        letters = random.Random(0)
        garbled = [row | {"solution": "".join(letters.sample(row["solution"], len(row["solution"])))} for row in rows]
        write(folder / f"{split}-garbled.jsonl", garbled)
    return folder


def one_by_one(pair: dict) -> list[dict]:
    """A pair as KTO takes it."""
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for side in ("chosen", "rejected")
    ]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(home: Path, name: str, *settings: str) -> dict:
    """Train the model; returns results.json."""
    paths = [f"output_dir={home}", f"name={name}", f"model.path={home / 'model'}"]
    runner.train(load(None, [*COMMON, *paths, *settings]).config)
    return load_json(home / name / "results.json")


@torch.inference_mode()
def margins(home: Path, model: Path) -> torch.Tensor:
    """log p(with working) − log p(without) for the held-out problems."""
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    rows = [json.loads(line) for line in (home / "test-true.jsonl").read_text().splitlines()]
    prompts = [
        tokenizer.apply_chat_template(turns(row["prompt"]), add_generation_prompt=True, tokenize=False) for row in rows
    ]

    def log_prob(side: str) -> torch.Tensor:
        replies = [row[side].removeprefix(TAGS.reasoning_start) for row in rows]
        batch = functional.tokenize_prompt_and_output(prompts, replies, tokenizer)
        log_probs = functional.get_response_log_probs(policy, batch["input_ids"], batch["labels"])["log_probs"]
        return functional.masked_normalize(log_probs, batch["response_mask"], dim=1)

    return log_prob("chosen") - log_prob("rejected")


@pytest.mark.parametrize("method", PREFERENCE)
def test_preferences_are_learned_and_turn_with_the_labels(home, method):
    """Of 50 held-out pairs at least 45 come apart as labelled. Labels turned round do not move them that way.

    ORPO's likelihood makes every reply likelier, the longer one by more nats: a tenth of the way is allowed.
    """
    before, change = margins(home, home / "model"), {}
    for labels in ("true", "turned"):
        file = f"train-{labels}-kto.jsonl" if method == "kto" else f"train-{labels}.jsonl"
        source = f"data.source={home / file}"
        train(home, f"{method}-{labels}", *PREFERENCE[method], source, "training.max_steps=10")
        change[labels] = margins(home, home / f"{method}-{labels}/final") - before
        up = int((change[labels] > 0).sum())
        print(method, labels, f"mean change {change[labels].mean():+.2f} nats, {up} of 50 up")
    assert (change["true"] > 0).sum() >= 45
    assert change["turned"].mean() < change["true"].mean() / 10


def test_sft_learns_solutions_and_not_from_garbled_ones(home):
    """Loss on held-out solutions: less than half of the untrained one; trained on garbled solutions, far above that."""
    held_out = ["data.validation.source=builtin:arithmetic", "data.validation.max_rows=50"]
    settings = ["method.type=sft", *held_out, "training.max_steps=60", "training.batch_size=4"]
    source = 'data.source=[{"source": "builtin:arithmetic", "max_rows": 240}]'
    results = train(home, "sft", *settings, source)
    start, final = (results[when]["eval_loss"] for when in ("start", "final"))
    garbled = train(home, "garbled", *settings, f"data.source={home / 'train-garbled.jsonl'}")["final"]["eval_loss"]
    print(f"held-out loss {start:.2f} -> {final:.2f}; from garbled solutions {garbled:.2f}")
    assert final < start / 2 and garbled > 1.2 * final
