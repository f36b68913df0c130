"""A step of GRPO over episodes of eight turns compared with TRL: `python -m benchmarks.turns`.

The model (Qwen3 architecture and tokenizer, 33M parameters) is first taught to read a book: it calls the tool `read`
for one page after the other and then answers, so that both sides have the same episodes. 4 prompts x 8 episodes per
step, the same environment class on both sides, float32, temperature 0.3 and TRL's other defaults. The sides run in
separate processes, in turn. The time is from the start of the first reply to the end of the last update.

It also measures, for our side alone:
- the training of these episodes against the same turns as rows of their own, each with all that precedes it;
- the tokens that packs feed, over the number of different tokens, at 8, 32 and 128 turns;
- codec, masks and store at 128 turns, over the time in which the engine generates these turns.

Prints the tables and writes results/turns.json. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from transformers import AutoTokenizer

from benchmarks.book import PAGES, Book, by_turns
from benchmarks.common import (
    SHARED,
    THREADS,
    TRL_SETTINGS,
    add_results,
    in_own_process,
    peak_memory_gb,
    processors,
    put_table,
    write_rows,
)
from benchmarks.models import write_model

RESULTS = Path(__file__).parent / "results"
PROMPTS, GENERATIONS, STEPS, LIMIT, TEMPERATURE = 4, 8, 2, 700, 0.3
GOALS = {"time": 4.0, "memory": 0.4, "rows": 3.0, "bookkeeping": 0.02}
QUESTION = {"role": "user", "content": "Read the book, then say what it is about."}
ANSWER = "It is about a cat that sleeps."


def conversation() -> list[dict[str, Any]]:
    book, talk = Book(), [QUESTION]
    book.reset()
    for page in range(1, PAGES + 1):
        call = {"type": "function", "function": {"name": "read", "arguments": {"page": page}}}
        talk += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        talk += [{"role": "tool", "name": "read", "content": book.read(page)}]
    return [*talk, {"role": "assistant", "content": ANSWER}]


def teach(folder: Path) -> Path:
    """The folder of a model that reads the book; created if missing."""
    from transformers.utils import get_json_schema

    import posttrain

    made = folder / "taught/final"
    if made.exists():
        return made
    write_model(
        folder / "start", SHARED / "tokenizers/qwen3", hidden_size=192, num_hidden_layers=6, intermediate_size=576,
        num_attention_heads=6, num_key_value_heads=3, head_dim=32, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )  # fmt: skip
    # Qwen3's template as TRL has it: it reads calls of templates that it knows alone.
    templates = find_spec("trl")
    assert templates is not None and templates.origin is not None
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    tokenizer.chat_template = (Path(templates.origin).parent / "chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder / "start")
    tools = [get_json_schema(Book().read)]
    rows = [{"messages": conversation(), "tools": tools}] * 64
    settings = {
        "name": "taught", "output_dir": str(folder), "model": str(folder / "start"), "devices": {"type": "cpu"},
        "method": {"type": "sft", "assistant_only_loss": True},
        "data": {"source": str(write_rows(folder / "talks.jsonl", rows)), "max_length": 2048},
        "training": {
            "batch_size": 2, "tokens_per_pack": 2048, "max_steps": 90, "learning_rate": 3e-3, "max_grad_norm": 1.0,
        },
    }  # fmt: skip
    (folder / "teach.json").write_text(json.dumps(settings))
    posttrain.train(folder / "teach.json")
    return made


# --- the sides --------------------------------------------------------------------------------------------------------


def run_posttrain(model: Path, folder: Path) -> dict[str, float]:
    from posttrain import runner
    from posttrain.config import load
    from posttrain.environments.episodes import Episodes

    run, began, sampling = Episodes.run, [], []

    def from_now(self, *arguments, **more):
        began.append(time.perf_counter())
        made = run(self, *arguments, **more)
        sampling.append(time.perf_counter() - began[-1])
        return made

    Episodes.run = from_now
    settings = {
        "name": "bench", "output_dir": str(folder), "model": str(model), "devices": {"type": "cpu"},
        "method": {"type": "grpo", "num_generations": GENERATIONS, "beta": 0.0},
        "environments": [{"name": "book", "class": "benchmarks.book:Book"}],
        "rewards": [{"type": "python", "function": "benchmarks.book:by_turns"}],
        "data": {
            "source": str(write_rows(folder / "rows.jsonl", [{"prompt": [QUESTION]}] * PROMPTS * STEPS)),
            "max_length": 2048,
        },
        "rollout": {"max_completion_length": LIMIT, "temperature": TEMPERATURE},
        "training": {
            "batch_size": PROMPTS, "tokens_per_pack": 2048, "max_steps": STEPS, "learning_rate": 1e-6,
            "lr_scheduler_type": "constant", "warmup_steps": 0,
        },
        "tracking": {"logging_steps": 1},
    }  # fmt: skip
    (folder / "bench.json").write_text(json.dumps(settings))
    runner.train(load(folder / "bench.json").config)
    seconds = time.perf_counter() - began[0]
    lines = [json.loads(line) for line in (folder / "bench/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "turns" in line]
    return {
        "seconds": seconds,
        "sampling_seconds": sum(sampling),
        "turns": statistics.fmean(line["turns"] for line in lines),
        "length": statistics.fmean(line["completions/mean_length"] for line in lines),
    }


def run_trl(model: Path, folder: Path) -> dict[str, float]:
    import trl
    from datasets import Dataset

    config = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=GENERATIONS,
        gradient_accumulation_steps=PROMPTS,
        num_generations=GENERATIONS,
        max_completion_length=LIMIT,
        temperature=TEMPERATURE,
        max_steps=STEPS,
        learning_rate=1e-6,
        chat_template_kwargs={},
        **TRL_SETTINGS,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = Dataset.from_list([{"prompt": [QUESTION]}] * PROMPTS * STEPS)
    trainer = trl.GRPOTrainer(
        str(model), by_turns, args=config, train_dataset=rows, environment_factory=Book,
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    generate, began, sampling = trainer.model.generate, [], []

    def from_now(*arguments, **more):
        began.append(time.perf_counter())
        made = generate(*arguments, **more)
        sampling.append(time.perf_counter() - began[-1])
        return made

    trainer.model.generate = from_now
    trainer.train()
    seconds = time.perf_counter() - began[0]
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "seconds": seconds,
        "sampling_seconds": sum(sampling),
        "turns": 1 + statistics.fmean(line["tools/call_frequency"] for line in lines),
        "length": statistics.fmean(line["completions/mean_length"] for line in lines),
    }


# --- our side alone ---------------------------------------------------------------------------------------------------


def trajectories(
    model: Path, turns: int, group: int = GENERATIONS
) -> tuple[list[int], list[list[tuple[list[int], bool]]]]:
    """A prompt, and a group of episodes that follow it."""
    from transformers.utils import get_json_schema

    from posttrain.data.codec import Codec

    tokenizer = AutoTokenizer.from_pretrained(model)
    codec, made = Codec(tokenizer, [get_json_schema(Book().read)]), []
    prompt = codec.first([QUESTION])
    for number in range(group):
        ids, parts = list(prompt), []
        for turn in range(turns):
            call = {"name": "read", "arguments": {"page": turn * group + number}}
            written = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
            reply = tokenizer(written)["input_ids"]
            ids += reply
            parts.append((reply, True))
            if turn < turns - 1:
                message = {"role": "tool", "name": "read", "content": f"Page {turn}. The cat {number} sleeps. Go on."}
                added = codec.bridge(ids, [message])
                ids += added
                parts.append((added, False))
        made.append(parts)
    return prompt, made


def loaded(model: Path) -> Any:
    """The model as posttrain trains it."""
    from posttrain.config import ModelConfig
    from posttrain.models.load import load_model

    return load_model(ModelConfig(path=str(model)), "lm", torch.float32, torch.device("cpu"))


def feed(model: Path, examples: list[Any], tokens: int) -> float:
    """The seconds of a pass forward and back over packs of the examples."""
    from posttrain.batch import pack
    from posttrain.scoring import Scorer

    scorer = Scorer(loaded(model))
    packs = pack(examples, tokens)
    for warm in (packs[:1], packs):
        began = time.perf_counter()
        for each in warm:
            scorer(each).logprob_N.sum().backward()
        seconds = time.perf_counter() - began
    return seconds


def packing(model: Path) -> dict[str, float]:
    """Episodes in packs: tokens fed over different tokens; and their time against a row for each turn."""
    from posttrain.batch import Example, Node, pack

    found = {}
    for turns in (8, 32, 128):
        prompt, group = trajectories(model, turns)
        leaves = []
        for parts in group:
            tokens = [token for part, _ in parts for token in part]
            trained = [sampled for part, sampled in parts for _ in part]
            leaves.append(Node(tokens, trained=trained))
        whole = [Example((Node(prompt, children=tuple(leaves)),), row=0)]
        different = len(prompt) + sum(len(leaf.tokens) - 1 for leaf in leaves)  # the last token is only a target
        fed = sum(each.num_tokens for each in pack(whole, 1 << 20))
        found[f"fed over different tokens, {turns} turns"] = fed / different
        if turns == 8:
            found["rows"] = feed(model, separate(prompt, group), 2048) / feed(model, whole, 1 << 20)
            grown = branching(group)
            found["branches"] = feed(model, separate(prompt, grown), 2048) / feed(model, tree(prompt, grown), 1 << 20)
    return found


def separate(prompt: list[int], group: list[Any]) -> list[Any]:
    """A row for each turn of the episodes, with all that precedes it; rows share no tokens."""
    from posttrain.batch import Example, Node

    rows = []
    for parts in group:
        before = list(prompt)
        for part, sampled in parts:
            if sampled:
                trained = [False] * len(before) + [True] * len(part)
                rows.append(Example((Node([*before, *part], trained),), row=len(rows)))
            before += part
    return rows


def branching(group: list[Any], trees: int = 2) -> list[Any]:
    """The group as if all but the first `trees` episodes branched from these, after different turns."""
    grown = list(group[:trees])
    for number, own in enumerate(group[trees:]):
        shared = 2 * (1 + number % (len(own) // 2))  # a reply and what the tool said to it
        grown.append([*group[number % trees][:shared], *own[shared:]])
    return grown


def tree(prompt: list[int], grown: list[Any], trees: int = 2) -> list[Any]:
    """Episodes that branch, as training lays them."""
    from posttrain.batch import Example, Node
    from posttrain.environments.trajectory import Trajectory
    from posttrain.rewards.parts import CompletionReward
    from posttrain.rollout import Rollout, SampledCompletion

    completions = []
    for number, parts in enumerate(grown):
        tokens = [token for part, _ in parts for token in part]
        trained = [sampled for part, sampled in parts for _ in part]
        logprobs = [-1.0] * sum(trained)
        episode = Trajectory(prompt, [], tokens, trained, logprobs, tree=number % trees)
        completions.append(
            SampledCompletion(0, tokens, logprobs, "", "stop", 0, CompletionReward(0.0), trained, episode)
        )
    rollout = Rollout([Example((Node(prompt),), row=0)], completions)
    return rollout.examples(range(len(grown)), 1 << 20)[0]


def bookkeeping(model: Path, turns: int = 128, reply: int = 24) -> dict[str, float]:
    """Codec, masks and store of an episode of many turns, over the time in which the engine generates its replies."""
    import numpy as np

    from posttrain.data.codec import Codec
    from posttrain.engines import EmbeddedEngine, Sampling
    from posttrain.engines.turns import Turn, converse
    from posttrain.environments.trajectory import Trajectory
    from posttrain.runs.rollouts import RolloutStore, StoredPrompt, StoredRollout

    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = EmbeddedEngine(loaded(model), tokenizer)
    prompt, [parts] = trajectories(model, turns, 1)
    added = [part for part, sampled in parts if not sampled]
    done: list[int] = []
    begun: Future[Any] = Future()
    begun.set_result(Turn(prompt, 0, reply))

    def follow(index, completion):
        done.append(len(completion.tokens))
        if len(done) > len(added):
            return None
        following: Future[Any] = Future()
        following.set_result(Turn(added[len(done) - 1], len(done), reply))
        return following

    began = time.perf_counter()
    converse(engine, [begun], Sampling(max_completion_length=reply), follow=follow, longest=8000)
    generating = time.perf_counter() - began
    from transformers.utils import get_json_schema

    codec = Codec(tokenizer, [get_json_schema(Book().read)])
    with TemporaryDirectory() as folder:
        store = RolloutStore(Path(folder), 1 << 30, after=-1)
        began = time.perf_counter()
        made = Trajectory(prompt, [])
        for number in range(turns):
            sampled = parts[2 * number][0]
            made.add("model", sampled, [-0.5] * len(sampled))
            parsed = codec.parse(sampled)
            made.messages.append(parsed.message)
            if number < turns - 1:
                message = {"role": "tool", "name": "read", "content": f"Page {number}. The cat 0 sleeps. Go on."}
                made.add("tool", codec.bridge([*made.prompt, *made.tokens], [message]))
                made.messages.append(message)
        numbers = np.asarray(made.logprobs)
        arrays = {"tokens": np.asarray(made.tokens), "sampler_logprobs": numbers, "old_logprobs": numbers}
        row = StoredRollout(
            0, 0, str(tokenizer.decode(made.tokens)), 1.0, 0.0, "stop", 0, {}, arrays, np.asarray(made.trained),
            turns=made.stored(),
        )  # fmt: skip
        store.add(1, 0.0, [StoredPrompt(0, "q", prompt, {})], [row])
        store.close()
        seconds = time.perf_counter() - began
    return {"bookkeeping": seconds / generating, "bookkeeping_s": seconds, "generating_s": generating}


# --- the comparison ---------------------------------------------------------------------------------------------------


def one_side(side: str, model: Path) -> dict[str, float]:
    torch.set_num_threads(THREADS)
    if side == "alone":
        return packing(model) | bookkeeping(model)
    with TemporaryDirectory() as folder:
        found = (run_posttrain if side == "posttrain" else run_trl)(model, Path(folder))
    return found | {"peak_gb": peak_memory_gb()}


def table(results: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    ours, theirs = (
        {name: statistics.median(one[name] for one in results[side]) for name in results[side][0]}
        for side in ("posttrain", "trl")
    )
    alone, ratios = results["alone"], results["time_ratios"]
    lines = ["| | measured | goal |", "|---|---|---|"]
    lines += [
        f"| TRL time ÷ ours, {ours['turns']:.1f} / {theirs['turns']:.1f} turns | {results['time_ratio']:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) | ≥ {GOALS['time']:.0f} |",
        f"| s a step, ours / TRL | {ours['seconds'] / STEPS:.1f} / {theirs['seconds'] / STEPS:.1f} | |",
        f"| of it sampling | {ours['sampling_seconds'] / STEPS:.1f} / {theirs['sampling_seconds'] / STEPS:.1f} | |",
        f"| our peak memory ÷ TRL's | {results['memory_ratio']:.2f} | ≤ {GOALS['memory']} |",
        f"| rows of their own ÷ episodes, 8 turns × {GENERATIONS} | {alone['rows']:.2f} | |",
        f"| the same, if six of eight branch from the others | {alone['branches']:.2f} | ≥ {GOALS['rows']:.0f} |",
    ]
    lines += [f"| {name} | {value:.2f} | 1.00 |" for name, value in alone.items() if name.startswith("fed")]
    lines += [f"| bookkeeping ÷ generation, 128 turns | {alone['bookkeeping']:.2%} | < {GOALS['bookkeeping']:.0%} |"]
    return "\n".join([*lines, "", processors({"turns": results})])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=["posttrain", "trl", "alone"], help="one side in this process")
    parser.add_argument("--model", type=Path, help="folder of a model that was taught before")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(one_side(arguments.side, arguments.model)))
        return
    with TemporaryDirectory() as folder:
        model = arguments.model or teach(Path(folder))
        found: dict[str, list[dict[str, float]]] = {"posttrain": [], "trl": []}
        for number in range(arguments.rounds):
            for side, results in found.items():
                results.append(in_own_process("turns", "--side", side, "--model", str(model)))
                print(f"  {number + 1}/{arguments.rounds}: {side} {results[-1]}", flush=True)
        alone = in_own_process("turns", "--side", "alone", "--model", str(model))
    pairs = list(zip(found["posttrain"], found["trl"], strict=True))
    times = [theirs["seconds"] / ours["seconds"] for ours, theirs in pairs]
    memory = statistics.median(ours["peak_gb"] / theirs["peak_gb"] for ours, theirs in pairs)
    if any(abs(ours["turns"] / theirs["turns"] - 1) > 0.02 for ours, theirs in pairs):
        raise SystemExit(f"the sides have different numbers of turns: {pairs}")
    results = {"time_ratio": statistics.median(times), "time_ratios": times, "memory_ratio": memory} | found
    whole = add_results(RESULTS / "turns.json", {"turns": results | {"alone": alone}})
    put_table(RESULTS.parent / "README.md", table(whole["turns"]), "turns")
    print(table(whole["turns"]))
    missed = []
    if results["time_ratio"] < GOALS["time"] or memory > GOALS["memory"]:
        missed.append(f"{results['time_ratio']:.2f} times as fast in {memory:.2f} of the memory")
    missed += [f"branches: {alone['branches']:.2f}"] if alone["branches"] < GOALS["rows"] else []
    missed += [f"{name}: {v:.3f}" for name, v in alone.items() if name.startswith("fed") and v > 1.005]
    missed += [f"bookkeeping: {alone['bookkeeping']:.1%}"] if alone["bookkeeping"] >= GOALS["bookkeeping"] else []
    if missed:
        raise SystemExit("goals missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
