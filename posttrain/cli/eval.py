"""`posttrain eval`, `export` and `quantize`: models measured, and written for other programs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.base.console import PlainConsole
from posttrain.base.errors import UsageError
from posttrain.base.imports import need, quick_imports
from posttrain.base.options import Flag, values_of
from posttrain.base.terminal import say
from posttrain.cli.command import Interrupted
from posttrain.cli.settings import devices_from_flag
from posttrain.config import DataConfig, DevicesConfig, ModelConfig
from posttrain.config.options import DATA, DEVICE, DTYPE, EvalOptions, ExportOptions, QuantizeOptions, from_flags
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.suite import CALIBRATED, LM_EVAL, SuiteConfig
from posttrain.runs.finding import locate_model

ENGINES, DTYPES = ("ollama", "llama.cpp", "vllm"), ("auto", "float32", "bfloat16", "float16")
NOT_PASSED = 3  # exit status
SIZE = re.compile(r"\d+(?:\.\d+)? ?(?:[KMGT]i?B)", re.IGNORECASE)
Model = Annotated[
    str, typer.Argument(help="A run (its final or best model), a checkpoint, an adapter, any other model or a hub id.")
]


def eval(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Hub ids, folders, adapters, checkpoints, runs (their newest model), or files with recorded "
            "completions.",
        ),
    ] = None,
    suite: Annotated[
        str | None, Flag("Built-in suites, .yaml files, module:function, lm-eval:TASK.", "-s", metavar="NAME,...")
    ] = None,
    list_suites: Annotated[bool, Flag("List the built-in suites and exit.", "--list")] = False,
    data: Annotated[Sequence[str], DATA] = (),
    *,
    options: EvalOptions,
    export: Annotated[
        str | None,
        Flag("Also write the records in this format; works even without --suite.", metavar="inspect|lm-eval"),
    ] = None,
    dtype: Annotated[str, DTYPE] = "auto",
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Evaluate models on suites of questions, with intervals.

    Answers are graded as in training and stored at once, so a stopped evaluation can be resumed. Each model has a
    folder with `evaluation.sqlite`, `answers.jsonl` (every answer with its verdict) and `summary.json`. Answers that
    could not be graded are counted, never scored.

        posttrain eval runs/sft --suite gsm8k,math500
        posttrain eval MODEL --suite gsm8k -n 4 --temperature 0.6,1.0
        posttrain eval answers.jsonl --suite gsm8k --completion-column solution
        posttrain eval MODEL --suite lm-eval:hellaswag --max-rows 100
        posttrain eval evaluations/MODEL --export inspect
    """
    if list_suites:
        from posttrain.evaluation.suite import suites_table

        PlainConsole().print(suites_table())
        return
    if not models:
        raise UsageError("give a MODEL to evaluate: a folder, a hub id, a run, or a file with recorded completions")
    if suite is None and export is None:
        raise UsageError("give the suites with --suite, such as --suite gsm8k; posttrain eval --list shows them")
    folders = models if suite is None else _evaluated(models, suite, data, options, dtype, devices_from_flag(device))
    if export is not None:
        from posttrain.evaluation.exports import export_evaluation

        for folder in folders:
            for path in export_evaluation(Path(folder), export):
                say(f"written: {path}")


def _evaluated(
    models: Sequence[str], suite: str, data: Sequence[str], options: EvalOptions, dtype: str, devices: DevicesConfig
) -> list[str]:
    """Evaluate the models and print the tables. Returns the folders."""
    for model in models:
        name, equals, value = model.partition("=")
        if equals and name.replace(".", "").isidentifier() and not Path(model).exists():
            flag = name.rpartition(".")[2].replace("_", "-")
            raise UsageError(f"{model} is neither a model nor a flag: write --{flag} {value} (eval takes no overrides)")
    from_flags(RolloutConfig, engine=options.engine, top_k=options.top_k, min_p=options.min_p)
    names = [name.strip() for name in suite.split(",")]
    tasks = [name.removeprefix(LM_EVAL) for name in names if name.startswith(LM_EVAL)]
    others = ",".join(name for name in names if not name.startswith(LM_EVAL))
    if tasks:
        need("lm_eval", "lm-eval", f"--suite {LM_EVAL}{tasks[0]}")
    suites = suites_of(others, options.of_suites, data) if others else []
    _refuse_unread(suites, options)
    with quick_imports():
        from posttrain.api import evaluate  # these import torch, which takes seconds
        from posttrain.evaluation.items import load_items
        from posttrain.evaluation.table import show, write_sweep
        from posttrain.models.load import load_config
    folders = _folders(models, options.output)
    configs = {path: from_flags(ModelConfig, path=path, dtype=dtype) for path, _ in folders.values()}
    for path, model in configs.items():
        if not Path(path).is_file():
            load_config(model)  # a missing model is an error before any data is read
        elif tasks:
            raise UsageError(f"{path} has recorded completions, which lm-eval's tasks cannot grade: give a model")
    to_evaluate = [*(load_items(part, options.max_rows) for part in suites), *(f"{LM_EVAL}{task}" for task in tasks)]
    summaries: dict[str, Mapping[str, Any]] = {}
    try:
        for folder, (path, name) in folders.items():
            arguments = values_of(options) | {"output": folder, "dtype": configs[path].dtype, "device": devices}
            evaluated = evaluate(path, to_evaluate, **arguments).summary
            summaries[str(folder)] = {"model": {"name": name}, "suites": evaluated}
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            "interrupted: answers so far are stored, and the same command without --overwrite resumes after them"
        ) from interrupt
    show(summaries)
    for folder, summary in summaries.items():
        if picture := write_sweep(summary, Path(folder)):
            say(f"written: {picture}")
    for folder in summaries:
        say(f"written: {folder}")
    return list(summaries)


def suites_of(texts: str, settings: Mapping[str, Any], data: Sequence[str]) -> list[SuiteConfig]:
    """The suites that `--suite` names, with these settings and the sources of `--data`."""
    from posttrain.evaluation.suite import find_suite, with_settings

    suites = [with_settings(find_suite(text.strip()), settings) for text in texts.split(",") if text.strip()]
    names = [suite.name for suite in suites]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not suites or twice:
        raise UsageError(f"--suite names {', '.join(twice)} twice" if twice else "--suite names no suite")
    sources = _sources(data, names)
    return [
        with_settings(suite, {"source": sources[suite.name]}) if suite.name in sources else suite for suite in suites
    ]


def _refuse_unread(suites: Sequence[SuiteConfig], options: EvalOptions) -> None:
    """Raise UsageError for an option that none of the suites reads."""
    of_pairs = {"--reference": options.reference, "--num-batches": options.num_batches}
    unread = [name for name, value in of_pairs.items() if value is not None]
    if unread and not any(suite.kind == "preference" for suite in suites):
        raise UsageError(f"{unread[0]} applies only to suites of pairs, such as hh, but --suite has none")
    if options.calibrate and not any(suite.kind == "generate" and suite.rule in CALIBRATED for suite in suites):
        rules = " and ".join(sorted(CALIBRATED))
        raise UsageError(f"--calibrate compares verifiers for the rules {rules}, but no suite in --suite uses these")


def _sources(texts: Sequence[str], suites: Sequence[str]) -> dict[str, str]:
    """The sources that `--data` names, by suite; a source without a name belongs to the only suite."""
    from posttrain.evaluation.suite import ALIASES

    sources: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        name = ALIASES.get(name, name)
        if not equals or (name not in suites and Path(text).exists()):
            if len(suites) > 1:
                raise UsageError(f"--data {text}: with several suites, write NAME={text}, such as {suites[0]}={text}")
            name, path = suites[0], text
        if name not in suites:
            raise UsageError(f"--data {text}: {name} is not one of the suites {', '.join(suites)}")
        sources[name] = path
    return sources


def _folders(models: Sequence[str], output: Path | str | None) -> dict[Path, tuple[str, str]]:
    """The folder of each model's records, with its path and name. Raises UsageError if two share a folder."""
    folders: dict[Path, tuple[str, str]] = {}
    for model in models:
        path, name, folder = locate_model(model)
        if output is not None:
            folder = Path(output, name.replace("/", "-") if len(models) > 1 else "")
        if folder in folders:
            other = folders[folder][0]
            if other == path:
                raise UsageError(f"{path} is given twice")
            raise UsageError(
                f"{other} and {path} would be evaluated in the same folder, {folder}: evaluate each separately, with "
                "its own --output"
            )
        folders[folder] = path, name
    return folders


def export(model: Model, options: ExportOptions, device: Annotated[str, DEVICE] = "auto") -> None:
    """Export a model for plain transformers, vLLM, llama.cpp or ollama, and to the hub.

    An adapter is merged into its base, and outputs before and after are compared on real prompts. Then plain
    transformers loads the written files, and its outputs are compared too. The folder contains safetensors, tokenizer,
    chat template, stop tokens, and a model card with data, settings and results of the run. The folder is complete or
    absent; --overwrite replaces an earlier one.
    """
    for name, values, known in (("--dtype", [options.dtype], DTYPES), ("--for", options.engines, ENGINES)):
        for value in values:
            if value not in known:
                raise UsageError(f"{name} {value}: {did_you_mean(value, known)}")
    if not SIZE.fullmatch(options.max_shard_size):
        raise UsageError(
            f"--max-shard-size {options.max_shard_size}: it must be a number with a unit, such as 5GB or 500MB"
        )
    if options.private and options.push_to_hub is None:
        raise UsageError("--private applies to the hub: give --push-to-hub ID as well")
    devices = devices_from_flag(device)
    with quick_imports():
        from posttrain.export.export import export as export_model  # imports torch, which takes seconds

    try:
        export_model(model, options, devices, say)
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", None) or ["nothing was written"]
        raise Interrupted(f"interrupted: {' '.join(notes)}") from error


def quantize(model: Model, options: QuantizeOptions) -> None:
    """Quantise a model's linear layers, and measure what that changes.

    Plain transformers and every posttrain command can load the folder. Adapters are merged first; heads, embeddings and
    norms keep their precision. The gate compares both models on your rows: KL and greedy flips on tokens that the
    original samples, or a reward model's accuracy on pairs, and the accuracy on suites. A check passes if its 95 %
    interval is within the limit. Exit status 3: the gate is not passed, but the model is written (quantization.json).

        posttrain quantize runs/sft --to int8 --gate prompts.jsonl
        posttrain quantize runs/reward/best --to nf4 --gate pairs.jsonl
        posttrain quantize MODEL --to int4 --suite gsm8k
    """
    from_flags(RolloutConfig, options)
    from_flags(ModelConfig, options, path=model)
    from_flags(DataConfig, source="gate", format=options.format, template=options.template or "none")
    devices = devices_from_flag(options.device)
    suites = suites_of(options.suite, {}, options.data) if options.suite else []
    if options.data and not suites:
        raise UsageError("--data needs --suite, whose rows it replaces; to give rows for the gate, use --gate")
    with quick_imports():
        from posttrain.evaluation.items import load_items  # these import torch, which takes seconds
        from posttrain.export.gate import table
        from posttrain.export.quantize import notes
        from posttrain.export.quantize import quantize as quantize_model

    items = [load_items(suite, options.max_rows) for suite in suites]
    try:
        result = quantize_model(model, options, items, devices, say)
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted: nothing was written") from error
    PlainConsole().print(table(result.checks))
    for line in notes(result):
        say(line)
    if not result.passed:
        raise typer.Exit(NOT_PASSED)
