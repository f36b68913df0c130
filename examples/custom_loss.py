"""A custom loss on the packed batch: unlikelihood of the rejected completions of preference pairs.

    loss = mean over chosen tokens of -log p  +  alpha · mean over rejected tokens of -log(1 - p)

(Welleck et al. 2019, arXiv 1908.04319, equation 4.) The loop is that of a recipe without its run folder: examples are
packed, `Scorer` gives the log-probability of every target, the loss is a share of the step's mean, `update` sums the
gradients of the packs and takes one AdamW step. Run it with a small model, a folder or a hub id:

    python examples/custom_loss.py --model MODEL
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.batch import Example, Pack, pack
from posttrain.config import DataConfig, ModelConfig
from posttrain.data import prepare
from posttrain.losses import global_mean, nll
from posttrain.models.load import load_model, load_tokenizer
from posttrain.optim.update import AdamW, Objective, update
from posttrain.scoring import Scorer

ANIMALS = ["cat", "dog", "bird", "fish", "frog", "bear", "duck", "mouse", "horse", "rabbit", "fox", "pig"]
HELD_OUT = 3  # of them, the last ones
BATCH_SIZE, TOKENS_PER_PACK = 6, 1024


def unlikelihood(logprob_N: Tensor) -> Tensor:
    """-log(1 - p) of each token (N), from its log p; finite where p is 1."""
    return -torch.log1p(-logprob_N.exp().clamp(max=1 - 1e-6))


def objective_of(scorer: Scorer, packs: Sequence[Pack], alpha: float) -> Objective[Pack]:
    """The loss of a step. Its denominators are counted over all packs, before the first backward."""
    chosen = sum(int(pack.is_chosen_N.sum()) for pack in packs)
    rejected = sum(int((~pack.is_chosen_N).sum()) for pack in packs)

    def share(pack: Pack) -> tuple[Tensor, dict[str, Tensor]]:
        logprob_N, is_chosen_N = scorer(pack).logprob_N, pack.is_chosen_N  # N: targets, of all sequences of the pack
        likely = global_mean(nll(logprob_N[is_chosen_N]), chosen)
        unlikely = global_mean(unlikelihood(logprob_N[~is_chosen_N]), rejected)
        return likely + alpha * unlikely, {"chosen": likely.detach(), "rejected": unlikely.detach()}

    return Objective(share, chosen)


@torch.no_grad()
def accuracy(scorer: Scorer, examples: Sequence[Example]) -> float:
    """The share of pairs whose chosen completion is more likely than the rejected one."""
    right: list[bool] = []
    for batch in pack(examples, TOKENS_PER_PACK):
        chosen_P, rejected_P = batch.pairs(batch.sum_by_sequence(scorer(batch).logprob_N))
        right += (chosen_P > rejected_P).tolist()
    return sum(right) / len(right)


def write_pairs(file: Path, animals: Sequence[str]) -> None:
    """Stories that end badly, which a model of children's stories does not expect."""
    file.parent.mkdir(parents=True, exist_ok=True)
    starts = ("Once upon a time, there was a {}.", "One day, a {} went to the park.", "The little {} saw a big box.")
    prompts = [f"{start.format(animal)} The {animal} was very" for animal in animals for start in starts]
    rows = [{"prompt": prompt, "chosen": " sad.", "rejected": " happy."} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def pairs_of(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """The tokenised pairs of a file, each a tree: the prompt, and below it the chosen and the rejected completion."""
    data = prepare(DataConfig(source=str(file), template="none"), tokenizer, "pair").train
    return [data[row] for row in range(len(data))]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a small causal model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="1e-3 is for models of a million weights")
    parser.add_argument("--alpha", type=float, default=1.0, help="weight of the rejected tokens")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/custom-loss"), help="folder of the data and the model"
    )
    given = parser.parse_args(argv)

    model = ModelConfig(path=given.model)
    tokenizer = load_tokenizer(model)
    for name, animals in (("train", ANIMALS[:-HELD_OUT]), ("test", ANIMALS[-HELD_OUT:])):
        write_pairs(given.output / f"{name}.jsonl", animals)
    train, test = (pairs_of(given.output / f"{name}.jsonl", tokenizer) for name in ("train", "test"))
    policy = load_model(model, "lm", torch.float32, torch.device("cpu"))
    scorer, optimizer = Scorer(policy), AdamW(policy)
    before = accuracy(scorer, test)
    for step in range(1, given.steps + 1):
        first = (step - 1) * BATCH_SIZE
        packs = pack([train[index % len(train)] for index in range(first, first + BATCH_SIZE)], TOKENS_PER_PACK)
        made = update(packs, objective_of(scorer, packs, given.alpha), optimizer, given.learning_rate)
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}", *(f"{name} {value:.3f}" for name, value in made.metrics.items()), sep="  ")
    after = accuracy(scorer, test)
    print(f"chosen above rejected, of held-out animals: {before:.0%} before, {after:.0%} after")
    policy.save_pretrained(given.output / "final")
    tokenizer.save_pretrained(given.output / "final")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
