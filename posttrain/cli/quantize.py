"""`posttrain quantize`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.cli.errors import Interrupted, UsageError
from posttrain.cli.eval import suites_of
from posttrain.cli.score import Format
from posttrain.cli.settings import Device, devices_from_flag, from_flags
from posttrain.config import DataConfig, ModelConfig
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.schema.rollout import RolloutConfig

if TYPE_CHECKING:  # imports torch
    from posttrain.export.gate import Limits
    from posttrain.export.quantize import Asked, Quantised
    from posttrain.models.quantised import Precision

NOT_PASSED = 3  # exit status
PRECISIONS: "dict[str, Precision]" = {"int8": "int8", "int4": "int4", "nf4": "int4"}

Model = Annotated[
    str, typer.Argument(help="A run (its final model, else its best), a checkpoint, an adapter, any model or hub id.")
]
To = Annotated[str, typer.Option("--to", help="int8: LLM.int8; int4, or nf4: NF4 with double quantisation.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="A new folder; default: in the run, else in quantized_models/.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier quantised model.")]
Gate = Annotated[
    list[Path] | None,
    typer.Option(
        "--gate",
        metavar="FILE",
        help="Your prompts, or pairs for a reward model; repeatable. Default: the run's data, or built-in prompts.",
    ),
]
Suite = Annotated[
    str | None, typer.Option("--suite", "-s", metavar="NAME,...", help="Suites to evaluate before and after.")
]
SuiteData = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="[NAME=]FILE", help="Local rows of a suite instead of its source; repeatable."),
]
MaxRows = Annotated[
    int | None,
    typer.Option("--max-rows", min=1, help="Rows of the gate and of each suite; default: 128 prompts, 1,000 pairs."),
]
Temperature = Annotated[float, typer.Option("--temperature", help="Temperature of the compared completions.")]
MaxLength = Annotated[int, typer.Option("--max-completion-length", help="Longest compared completion in tokens.")]
Engine = Annotated[str, typer.Option("--engine", help="embedded; transformers: any architecture; vllm.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed of the completions.")]
MaxKl = Annotated[float | None, typer.Option("--max-kl", min=0, help="Limit in nats; default: int8 0.01, int4 0.1.")]
MaxFlips = Annotated[
    float | None,
    typer.Option("--max-flips", min=0, help="Limit as a share; default: int8 0.05, int4 0.15 (of pairs 0.1)."),
]
MaxDrop = Annotated[float | None, typer.Option("--max-drop", min=0, help="Limit of accuracy lost; default: 0.03.")]
MaxWeightError = Annotated[
    float | None, typer.Option("--max-weight-error", min=0, help="Limit of a layer; default: int8 0.05, int4 0.2.")
]
Template = Annotated[
    str | None,
    typer.Option("--template", help="As data.template; default: the run's, else chat if there is one, else none."),
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (as stored), float32 or bfloat16; of all other weights.")]


def quantize(
    model: Model,
    to: To,
    output: Output = None,
    overwrite: Overwrite = False,
    gate: Gate = None,
    suite: Suite = None,
    data: SuiteData = None,
    max_rows: MaxRows = None,
    temperature: Temperature = 1.0,
    max_completion_length: MaxLength = 128,
    engine: Engine = "embedded",
    seed: Seed = 0,
    max_kl: MaxKl = None,
    max_flips: MaxFlips = None,
    max_drop: MaxDrop = None,
    max_weight_error: MaxWeightError = None,
    format: Format = "auto",
    template: Template = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Quantise a model's linear layers, and measure what that changes.

    The folder is loaded by plain transformers and by every command here. Adapters are merged first; heads, embeddings
    and norms keep their precision. The gate compares both models on your rows: KL and greedy flips on tokens that the
    original samples, or a reward model's accuracy on pairs, and the accuracy on suites. A check passes if its 95 %
    interval is within the limit. Exit status 3: written, but the gate is not passed (quantization.json).

        posttrain quantize runs/sft --to int8 --gate prompts.jsonl
        posttrain quantize runs/reward/best --to nf4 --gate pairs.jsonl
        posttrain quantize MODEL --to int4 --suite gsm8k
    """
    if to not in PRECISIONS:
        raise UsageError(f"--to {to}: {did_you_mean(to, PRECISIONS)}")
    rollout = from_flags(
        RolloutConfig,
        {"engine": engine, "temperature": temperature, "max_completion_length": max_completion_length},
    )
    wide = from_flags(ModelConfig, {"path": model, "dtype": dtype}).dtype
    from_flags(DataConfig, {"source": "gate", "format": format} | ({"template": template} if template else {}))
    devices = devices_from_flag(device)
    suites = suites_of(suite, {}, data) if suite else []
    if data and not suites:
        raise UsageError("--data is about suites: name one with --suite, or give rows with --gate")
    with quick_imports():
        from posttrain.evaluation.evaluate import Options
        from posttrain.evaluation.items import load_items  # these import torch, which takes seconds
        from posttrain.evaluation.pairs import PairOptions
        from posttrain.export.gate import LIMITS
        from posttrain.export.gate_data import Rows
        from posttrain.export.quantize import Asked

    precision = PRECISIONS[to]
    asked = Asked(
        model=model,
        to=precision,
        output=output,
        overwrite=overwrite,
        dtype=None if wide == "auto" else wide,
        rows=Rows(tuple(gate or ()), None if format == "auto" else format, template, max_rows, seed),
        rollout=rollout,
        limits=_limits(LIMITS[precision], max_kl, max_flips, max_drop, max_weight_error),
        suites=tuple(load_items(one, max_rows) for one in suites),
        options=Options(engine=rollout.engine, seed=seed, pairs=PairOptions(max_rows=max_rows, seed=seed)),
    )
    _run(asked, devices)


def _limits(
    limits: "Limits", kl: float | None, flips: float | None, drop: float | None, weights: float | None
) -> "Limits":
    from dataclasses import replace

    given = {"kl": kl, "flips": flips, "preferences": flips, "drop": drop, "weights": weights}
    return replace(limits, **{name: value for name, value in given.items() if value is not None})


def _run(asked: "Asked", devices) -> None:
    from posttrain.base.console import PlainConsole
    from posttrain.export.gate_table import notes, table
    from posttrain.export.quantize import quantize as quantize_model

    try:
        made: Quantised = quantize_model(asked, devices, say)
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted: nothing was written") from error
    PlainConsole().print(table(made.checks))
    for line in notes(made):
        say(line)
    if not made.passed:
        raise typer.Exit(NOT_PASSED)
