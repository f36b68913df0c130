"""Exports a run's model, or any other, to a folder for plain transformers and vLLM: merged, checked, documented."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.base.errors import ModelError
from posttrain.base.log import log
from posttrain.base.threads import sharing_cores
from posttrain.base.words import counted, hub_id_of, in_units
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.options import ExportOptions
from posttrain.engines import stop_token_ids
from posttrain.evaluation.records import SUMMARY, read_summary
from posttrain.export.card import WrittenModel, card
from posttrain.export.contents import Adapter, FoldedAdapters, QuantisedCopy
from posttrain.export.merging import DTYPES, load_base, merge, write_and_check
from posttrain.export.rows import prompts_for
from posttrain.export.serving import FILES, PLAIN, EngineFacts, write_for
from posttrain.export.source import Source, chats, find_source
from posttrain.export.targets import push, put, refuse_full_disk, refuse_target, token_for
from posttrain.models.devices import take_device
from posttrain.models.families import positions_of, set_eos_token_ids
from posttrain.models.load import load_config, load_tokenizer
from posttrain.models.quantised import method_of
from posttrain.runs.files import save_json
from posttrain.runs.finding import size_of
from posttrain.runs.inputs import content_of
from posttrain.training.job import set_pad_token

MARK = "export.json"  # a folder without this file is never replaced

Say = Callable[[str], None]


@sharing_cores()
def export(path: str, options: ExportOptions, devices: DevicesConfig, say: Say) -> Path:
    """Write the folder, and upload it if `push_to_hub` is set. Returns the folder. `say` takes the lines of the report.

    The folder is complete or absent, and replaces an existing one only with `overwrite`. Raises PosttrainError. If the
    upload or an engine's file fails, the folder is still complete, apart from that file.
    """
    token = token_for(options.push_to_hub) if options.push_to_hub else ""
    source = find_source(path)
    for option, is_set in (("--base", options.base is not None), ("--fold", options.fold)):
        if is_set and not source.adapter:
            raise ModelError(f"{option}: {source.model.path} is not an adapter: leave out {option}")
    if options.base is not None:
        source = replace(source, given_base=ModelConfig(path=options.base))
    target = (options.output or Path("exports") / source.name).expanduser()
    refuse_target(target, options.overwrite, MARK)
    merges = not options.fold and (options.merge or not source.adapter)
    if source.quantised is not None or not merges:
        what = "an adapter that is not merged" if source.quantised is None else "a quantised model"
        _refuse_unread(replace(options, prompts=None) if options.fold else options, what)
    if source.reward and (others := [name for name in options.engines if name != "vllm"]):
        raise ModelError(f"--for {others[0]}: this engine cannot serve a reward model: use vllm")
    evaluations = [_named(source, folder) for folder in options.evaluations] or list(own_evaluations(source))
    kind = ("quantised " if source.quantised else "") + ("reward model" if source.reward else "language model")
    say(f"model     {source.model.path}: {f'adapter of {source.base.path}, a ' if source.adapter else ''}{kind}")
    if options.fold:
        ready = FoldedAdapters(source, options.prompts, devices, say)
        source = replace(source, given_base=ready.base)
        if options.push_to_hub and hub_id_of(ready.base.path) is None:
            raise ModelError(f"--push-to-hub: the original base is the folder {ready.base.path}, which nobody else has")
    elif source.quantised is not None:
        ready = QuantisedCopy(source, target, devices)
        say(f"gate      {'passed' if source.quantised['gate']['passed'] else 'NOT passed: the model card says so'}")
    else:
        ready = _MergedModel(source, options, target, devices, say) if merges else Adapter(source)

    def write(folder: Path) -> None:
        written = ready.write(folder, target.name)
        text = card(source, written, target.name, options.push_to_hub or target.name, evaluations)
        (folder / "README.md").write_text(text, encoding="utf-8")
        base = hub_id_of(source.base.path) if source.adapter else None
        mark = {"format": 1, "posttrain": __version__, "name": source.name, "base": base, "merged": written.merged}
        save_json(folder / MARK, mark | {"dtype": written.dtype, "check": written.check})

    put(target, write, options.overwrite, MARK)
    weights = len(list(target.glob("*.safetensors")))
    say(f"written   {target}: {counted(weights, 'file')} of weights, {in_units(size_of(target))} in all")
    if options.push_to_hub:
        message = f"{source.name}, exported by posttrain {__version__}"
        commit = push(target, options.push_to_hub, token, options.private, options.overwrite, message)
        say(f"uploaded  {commit}")
    if ready.failed:
        raise ModelError(f"{target} is complete, but without {'; '.join(ready.failed)}")
    return target


def _refuse_unread(options: ExportOptions, what: str) -> None:
    """Raise ModelError for options that apply only to newly written weights."""
    flags = {"--dtype": "dtype", "--max-shard-size": "max_shard_size", "--prompts": "prompts", "--for": "engines"}
    for option, name in flags.items():
        if getattr(options, name) != getattr(ExportOptions(), name):
            raise ModelError(f"{option}: {what} is exported as it is: leave out {option}")


class _MergedModel:
    """A full model. An adapter is merged, and the result compared with the adapter, before anything is written."""

    def __init__(self, source: Source, options: ExportOptions, target: Path, devices: DevicesConfig, say: Say):
        self._source, self._options, self._say = source, options, say
        self.failed: list[str] = []
        config = load_config(source.base)
        if method_of(config) is not None and not source.adapter:
            raise ModelError(
                f"{source.base.path} is quantised, and not by posttrain quantize: export the model that it was "
                "quantised from"
            )
        stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        self._dtype = options.dtype if options.dtype != "auto" else stored if stored in DTYPES else "float32"
        self._tokenizer = load_tokenizer(source.model)
        base = load_base(source, take_device(devices))
        refuse_full_disk(target, sum(p.numel() for p in base.parameters()) * DTYPES[self._dtype].itemsize)
        self._prompts, self._compared = prompts_for(options.prompts, source.config, base, self._tokenizer)
        self._whole = merge(base, source, self._prompts, self._tokenizer)
        self._unit = "" if source.reward else " nats"
        say(f"compared  on {self._compared} (root mean squares)")
        if source.adapter:
            effect = f"; without the adapter: {self._whole.effect:.2g} nats" if self._whole.effect is not None else ""
            say(f"merged    differs from the adapter by {self._whole.merging:.2g}{self._unit}{effect}")

    def write(self, folder: Path, name: str) -> WrittenModel:
        source, dtype = self._source, self._dtype
        served = self._prepare(name)
        how = DTYPES[dtype], self._options.max_shard_size
        difference = write_and_check(self._whole, folder, source, self._prompts, *how)
        self._say(f"loaded    by plain transformers in {dtype}: differs by {difference:.2g}{self._unit}")
        self._tokenizer.save_pretrained(folder)
        for engine in dict.fromkeys(self._options.engines):
            try:
                write_for(engine, served, folder)
                self._say(f"for       {engine}: {FILES[engine]}")
            except ModelError as error:
                self.failed.append(f"{FILES[engine]} for {engine}: {error}")
        outputs = "rewards" if source.reward else "log-probabilities"
        check = (
            f"When loaded with plain transformers, the model's {outputs} differ from those of the trained model by "
            f"{difference:.2g} (root mean square, {self._compared})."
        )
        return WrittenModel(dtype, check, (), served.chat)

    def _prepare(self, name: str) -> EngineFacts:
        """Set the model's stop tokens, or a reward model's padding token. Returns the facts that engines need."""
        source, model, tokenizer = self._source, self._whole.model, self._tokenizer
        config, chat = source.config, chats(source, tokenizer)
        stops: tuple[int, ...] = ()
        sampling, origin_of = dict(PLAIN), "the model's own distribution"
        if source.reward:
            set_pad_token(model, tokenizer)
        elif model.generation_config is not None:
            stops = stop_token_ids(model, tokenizer, chat)
            set_eos_token_ids(model, stops)
            saved = model.generation_config.to_diff_dict()
            if known := {name: saved[name] for name in (*PLAIN, "repetition_penalty") if name in saved}:
                sampling, origin_of = sampling | known, "from generation_config.json"
            elif config is not None and config.method.samples_completions:
                sampling = {key: getattr(config.rollout, key) for key in PLAIN}
                origin_of = "as in training (rollout)"
        return EngineFacts(
            name=name,
            dtype=self._dtype,
            tokenizer=tokenizer,
            positions=positions_of(model.config),
            stop_token_ids=stops,
            stop=config.rollout.stop if config else (),
            sampling=sampling,
            sampling_from=origin_of,
            chat=chat,
            system_prompt=config.data.system_prompt if config else None,
            reward=source.reward,
        )


def _named(source: Source, folder: Path) -> Mapping[str, Any]:
    """An evaluation given by the user. Warns if it was measured on other weights, e.g. on an exported model."""
    summary = read_summary(folder)
    if summary["model"].get("content") != content_of(source.model):
        name = summary["model"]["name"]
        log.warning("%s is an evaluation of %s, not of these files: the model card says so", folder, name)
        return {**summary, "of": name}
    return summary


def own_evaluations(source: Source) -> Iterator[Mapping[str, Any]]:
    """The finished evaluations of these weights in the run's folder."""
    path = Path(source.model.path).absolute()
    folder = path.parent / "evaluation" / path.name
    if source.run is not None and (folder / SUMMARY).is_file():
        summary = read_summary(folder)
        if summary["model"].get("content") == content_of(source.model):
            yield summary
        else:
            log.warning("%s was measured on other weights: it is omitted from the model card", folder)
