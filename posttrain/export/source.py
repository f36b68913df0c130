"""What is exported: a model's folder or hub id, and the run that trained it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import ModelError, PosttrainError, RunError
from posttrain.base.log import log
from posttrain.base.words import SAVED, model_name
from posttrain.config import ModelConfig, RunConfig
from posttrain.models.adapters import BASE, base_settings, is_adapter
from posttrain.models.load import Head, is_reward_model, load_config
from posttrain.runs.checkpoint import MANIFEST, saved_step, unusable, verify
from posttrain.runs.files import load_json
from posttrain.runs.finding import newest_model
from posttrain.runs.inputs import START, content_of, recorded, run_settings
from posttrain.runs.summary import RunSummary, read_run

QUANTISED = "quantization.json"  # written by `posttrain quantize` into its folder: settings, sizes and the gate


@dataclass(frozen=True, slots=True)
class Source:
    """A model to export. If a run trained it, also the run's settings and results."""

    model: ModelConfig
    name: str
    adapter: bool
    reward: bool
    run: RunSummary | None = None
    config: RunConfig | None = None
    results: dict[str, Any] = field(default_factory=dict)
    step: int | None = None  # the training step of the weights
    quantised: dict[str, Any] | None = None  # the content of a quantised model's quantization.json
    given_base: ModelConfig | None = None  # replaces the base that the adapter names

    @property
    def is_last(self) -> bool:
        """Whether these are the weights at the end of the run, to which the run's results belong."""
        return self.step is not None and self.step == self.results.get("steps")

    @property
    def head(self) -> Head:
        """The head with which to load the model."""
        return "reward" if self.reward else "lm"

    @property
    def base(self) -> ModelConfig:
        """The model itself, or the base model of the adapter."""
        return self.given_base or base_settings(self.model)


def find_source(name_or_path: str) -> Source:
    """The model that a hub id or a folder names; of a run, the final model, or else the best, or the newest checkpoint.

    Raises RunError for a damaged or empty folder, ModelError for a file or if the base of an adapter is missing.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_file():
        raise ModelError(f"{name_or_path} is a file: name the folder of a model, a run, or a model on the hub")
    if folder.is_dir():
        best = (folder / "run.json").is_file() and not (folder / "final").is_dir() and (folder / "best").is_dir()
        folder = folder / "best" if best else newest_model(folder)
        if (folder / MANIFEST).exists() and (problems := verify(folder)):
            raise unusable(folder, problems)
    model = ModelConfig(path=str(folder) if folder.is_dir() else name_or_path)
    adapter = is_adapter(model)
    try:
        load_config(base_settings(model))  # the adapter's own files would suffice, but its base must exist, too
        reward = is_reward_model(model)
    except ModelError as error:
        if not adapter:
            raise
        raise ModelError(
            f"{model.path} is an adapter, and its base model cannot be read: {error}. Put the base model's path or hub "
            "id in adapter_config.json (base_model_name_or_path), or the base itself in a folder `base` next to the "
            "adapter"
        ) from error
    name = model_name(str(folder.absolute() if folder.is_dir() else name_or_path))
    if SAVED.fullmatch(folder.name) and folder.name != "final":
        name = f"{name}-{folder.name}"
    if not folder.is_dir():
        return Source(model, name, adapter, reward)
    quantised: dict[str, Any] | None = None
    if (file := folder / QUANTISED).is_file():
        quantised = load_json(file, links=True)
        kinds = {"model": dict, "to": str, "method": str, "dtype": str, "gate": dict}
        if not isinstance(quantised, dict) or not all(isinstance(quantised.get(n), kind) for n, kind in kinds.items()):
            raise RunError(f"{file} is damaged: quantise the model again")
        if not isinstance(quantised["model"].get("name"), str):
            raise RunError(f"{file} is damaged (no model name): quantise the model again")
        name = model_name(f"{quantised['model']['name']}-{quantised['to']}")
    run = folder.absolute().parents[0 if quantised is None else 1]
    if not (run / "run.json").is_file():
        return Source(model, name, adapter, reward, quantised=quantised)
    results = load_json(run / "results.json") if (run / "results.json").is_file() else {}
    saved = run / folder.name
    step = saved_step(saved) if (saved / MANIFEST).is_file() else None
    return Source(model, name, adapter, reward, read_run(run), _settings(run), results, step, quantised)


def adapters_of(source: Source) -> tuple[list[ModelConfig], ModelConfig]:
    """All adapters of the original base in the order of merging, the source's own adapter last; and that base."""
    adapters, base = [source.model], source.base
    while (earlier := base if is_adapter(base) else _merged_in(base)) is not None and earlier not in adapters:
        adapters.insert(0, earlier)
        base = base_settings(earlier)
    return adapters, base


def _merged_in(base: ModelConfig) -> ModelConfig | None:
    """The adapter that a run merged into its folder `base`; None for another folder. RunError: it has changed since."""
    folder = Path(base.path).resolve()
    run = folder.parent
    config = _settings(run) if folder.name == BASE and (run / "run.json").is_file() else None
    if config is None or not Path(config.models[0].path).is_dir() or not is_adapter(config.models[0]):
        return None
    adapter, before = config.models[0], recorded(run).get(START, {}).get("content")
    if before is not None and before.partition(",")[0] != content_of(adapter).partition(",")[0]:
        raise RunError(f"{adapter.path} is no longer the adapter that was merged into {folder}: restore the original")
    return adapter


def _settings(run: Path) -> RunConfig | None:
    try:
        return run_settings(run)
    except PosttrainError as error:
        log.warning("the settings of %s cannot be read (%s) and are not used", run, error)
        return None


def chats(source: Source, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether training used the chat template; for a model without a run, whether the tokenizer has a template."""
    return tokenizer.chat_template is not None and (source.config is None or source.config.data.template != "none")
