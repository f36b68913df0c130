"""Writes a model with quantised linear layers to a folder for plain transformers, and runs its gate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain import __version__
from posttrain.base.errors import ModelError
from posttrain.base.files import leftovers
from posttrain.base.imports import need
from posttrain.base.log import log
from posttrain.base.memory import release_memory
from posttrain.base.threads import sharing_cores
from posttrain.base.words import counted, hub_id_of, in_units
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.options import EvalOptions, Precision, QuantizeOptions
from posttrain.evaluation.evaluate import evaluate
from posttrain.evaluation.items import Items
from posttrain.evaluation.pairs import margins_of
from posttrain.evaluation.records import SUMMARY, read_answers
from posttrain.export import gate
from posttrain.export.card import start_of
from posttrain.export.merging import DTYPES
from posttrain.export.rows import completions_for, pairs_for
from posttrain.export.source import QUANTISED, Source, find_source
from posttrain.export.targets import put, refuse_full_disk, refuse_target
from posttrain.models.devices import take_device
from posttrain.models.load import check_embeddings, load_config, load_model, load_tokenizer
from posttrain.models.quantised import NAMES, linear_layers, method_of, quantised, stored_bytes, weight_of
from posttrain.runs.files import load_json, save_json
from posttrain.runs.finding import size_of
from posttrain.runs.inputs import content_of
from posttrain.runs.provenance import now

MARK = QUANTISED  # the file with the result; a folder without it is never replaced
SIDES = ("original", "quantized")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Quantised:
    """A written folder, the checks of its gate, and its sizes."""

    folder: Path
    checks: list[gate.Check]
    measured_on: str  # the rows of the gate in words
    sizes: dict[str, Any]

    @property
    def passed(self) -> bool:
        return all(check.verdict == "passed" for check in self.checks)


@sharing_cores()
def quantize(
    path: str, options: QuantizeOptions, suites: Sequence[Items], devices: DevicesConfig, say: Say
) -> Quantised:
    """Write the quantised model with its tokenizer and the result of its gate. `say` takes the lines of the report.

    The folder is complete or absent, and replaces an existing one only with `overwrite`. It is written even if the gate
    is not passed. The gate loads the written files again and measures them. Raises PosttrainError.
    """
    need("bitsandbytes", "quant", f"posttrain quantize --to {options.precision}")
    source = find_source(path)
    if (method := method_of(load_config(source.model))) is not None:
        raise ModelError(f"{source.model.path} is already quantised ({method}): give the model it was quantised from")
    generating = [items.suite.name for items in suites if items.suite.kind != "preference"]
    if source.reward and generating:
        raise ModelError(
            f"--suite {generating[0]}: {source.model.path} is a reward model: give suites of pairs, or --gate"
        )
    folder, name = Path(source.model.path), f"{source.name}_{options.precision}"
    in_run = folder.parent / f"quantized_{options.precision}" / folder.name
    target = options.output or (in_run if source.run is not None else Path("quantized_models") / name)
    refuse_target(target, options.overwrite, MARK)
    for left in leftovers(target.parent, target.name, ended=False) if target.parent.is_dir() else ():
        log.warning("%s was left unfinished by a killed process: delete it unless one is still writing it", left)
    work = _Work(options, source, devices, target, say)
    put(target, lambda folder: work.write(folder, suites), options.overwrite, MARK)
    say(f"written    {target}: {in_units(size_of(target))}")
    return work.result


class _Work:
    """Loads the original model and the rows of the gate before anything is written, then writes the folder."""

    result: Quantised

    def __init__(self, options: QuantizeOptions, source: Source, devices: DevicesConfig, target: Path, say: Say):
        self._options, self._source, self._devices, self._target, self._say = options, source, devices, target, say
        self._to: Precision = options.precision
        flips = options.max_flips
        chosen = {"kl": options.max_kl, "flips": flips, "preferences": flips, "drop": options.max_drop}
        chosen |= {"weights": options.max_weight_error}
        given = {name: value for name, value in chosen.items() if value is not None}
        self._limits = replace(gate.LIMITS[self._to], **given)
        config = load_config(source.model)
        half = getattr(config, "dtype", None) in (torch.bfloat16, torch.float16)
        kind = options.dtype if options.dtype != "auto" else "bfloat16" if half else "float32"
        self._dtype, self._device = DTYPES[kind], take_device(devices)
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(source.model)
        self._model = source.model.model_copy(update={"dtype": kind})
        self._original = self._loaded(self._model)
        check_embeddings(self._original, self._tokenizer, source.model.path)
        self._before = sum(parameter.nbytes for parameter in self._original.parameters())  # tied weights count once
        refuse_full_disk(target, self._before // 2)
        rows_for = pairs_for if source.reward else completions_for
        self._examples, self._rows = rows_for(options, source, self._original, self._tokenizer)

    def _loaded(self, model: ModelConfig) -> PreTrainedModel:
        return load_model(model, self._source.head, self._dtype, self._device)

    def write(self, folder: Path, suites: Sequence[Items]) -> None:
        other = quantised(self._original, self._to, self._dtype)
        other.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        sizes = self._sizes(other, folder)
        del other
        checks = [*self._checks(folder), *self._suite_checks(folder, suites)]
        self.result = Quantised(self._target, checks, self._rows, sizes)
        save_json(folder / MARK, self._facts())

    def _sizes(self, other: PreTrainedModel, folder: Path) -> dict[str, Any]:
        """Report and return the bytes of the quantised linear layers, in bfloat16 and as saved, and of all weights."""
        saved, all_layers = stored_bytes(other), linear_layers(self._original)
        kept = [name for name in all_layers if name not in saved]
        wide, linear = 2 * sum(weight_of(all_layers[name]).numel() for name in saved), sum(saved.values())
        files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        others = f", {counted(len(kept), 'other')} kept" if kept else ""
        self._say(
            f"quantised  {counted(len(saved), 'linear layer')} to {NAMES[self._to]}: "
            f"{linear / wide:.3f} of their size in bfloat16{others}"
        )
        self._say(f"weights    {in_units(self._before)} in {self._model.dtype}, now {in_units(files)}")
        self._say(f"gate       {self._rows}")
        sizes = {"linear_bfloat16": wide, "linear": linear, "weights_before": self._before, "weights": files}
        return {"layers": len(saved), "kept": kept, **sizes}

    def _checks(self, folder: Path) -> list[gate.Check]:
        """The checks that compare the written model with the original."""
        other = self._loaded(ModelConfig(path=str(folder), dtype=self._model.dtype))
        checks = [gate.check_weights(self._original, other, self._limits.weights)]
        examples = self._examples
        if examples and self._source.reward:
            models = {"original": self._original, "quantised": other}
            before, after = (
                margins_of(model, examples, len(examples), f"gate: rewards of the {what} model")
                for what, model in models.items()
            )
            checks += gate.check_margins(before, after, self._limits)
        elif examples:
            checks += gate.check_divergence(gate.diverge(self._original, other, examples), self._limits)
        return checks

    def _suite_checks(self, folder: Path, suites: Sequence[Items]) -> Iterator[gate.Check]:
        """Compare the accuracy on each suite before and after. The records are saved in `evaluation/` of the folder."""
        if not suites:
            return
        del self._original
        release_memory()
        options, records = self._options, folder / "evaluation"
        evaluation = EvalOptions(engine=options.engine, seed=options.seed, max_rows=options.max_rows)
        models = (self._model, ModelConfig(path=str(folder), dtype=self._model.dtype))
        for side, model in zip(SIDES, models, strict=True):
            evaluate(model, side, suites, evaluation, self._devices, records / side)
        summary = load_json(records / SIDES[1] / SUMMARY)
        summary["model"]["path"] = str(self._target)  # instead of the temporary folder
        save_json(records / SIDES[1] / SUMMARY, summary)
        answers = [read_answers(records / side) for side in SIDES]
        for suite in (items.suite.name for items in suites):
            before, after = ([answer for answer in of_side if answer.suite == suite] for of_side in answers)
            yield gate.check_suite(suite, before, after, self._limits.drop)

    def _facts(self) -> dict[str, Any]:
        """The content of quantization.json."""
        result, source, options = self.result, self._source, self._options
        names = ("temperature", "max_completion_length", "engine", "seed")
        sampling = {name: getattr(options, name) for name in names}
        return {
            "format": 1,
            "posttrain": __version__,
            "created": now(),
            "model": {"name": source.name, "path": source.model.path, "content": content_of(source.model)},
            "hub_id": hub_id_of(start_of(source).path),
            "to": self._to,
            "method": NAMES[self._to],
            "dtype": self._model.dtype,
            "bytes": {name: value for name, value in result.sizes.items() if name not in ("layers", "kept")},
            "layers": {"quantised": result.sizes["layers"], "kept": result.sizes["kept"]},
            "gate": {
                "passed": result.passed,
                "rows": result.measured_on,
                "sampling": None if source.reward else sampling,
                "checks": [asdict(check) for check in result.checks],
            },
        }


def notes(result: Quantised) -> Iterator[str]:
    """The lines below the table of checks: what was measured, and whether the gate is passed."""
    for of, checks in groupby(result.checks, key=lambda check: check.of):
        yield ", ".join(check.name + _change(check) for check in checks) + f": {of}"
    if len(result.checks) == 1:
        yield f"Only the weights were checked: {result.measured_on}."
    verdicts = {check.verdict for check in result.checks}
    if "failed" in verdicts:
        yield f"The gate is not passed: the model differs from the original by more than the limits ({MARK})."
    elif "unsure" in verdicts:
        yield "The gate is not passed: values are within the limits, but too few rows show it. Give more with --gate."
    else:
        yield "The gate is passed."


def _change(check: gate.Check) -> str:
    return "" if check.before is None or check.after is None else f" ({check.before:.1%}, now {check.after:.1%})"
