"""`stages:` in a settings file: several runs in one file, each with its own settings over the common ones."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.reading.files import KeyPath, Tree
from posttrain.config.schema.data import HeldOutRows
from posttrain.config.schema.run import RunConfig
from posttrain.config.schema.types import NAME_BYTES, WORD, is_name

# Names that a stage cannot have, because the folder that contains the stages' folders uses them for other things.
RESERVED = ("best", "ema", "final", "base", "comparison")
WHOLE_RUN = ("name", "output_dir", "behavior_version", "extends", "stages")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a run; a run without stages is one stage with an empty name. `init_from` is the stage whose final
    models this stage trains; `config.models` still holds the models of the first stage in the chain of `init_from`."""

    name: str
    init_from: str | None
    config: RunConfig

    def folder(self, root: Path, model: int, several_stages: bool) -> Path:
        """The folder in which model number `model` is trained in this stage."""
        if len(self.config.models) > 1:
            root = root / self.config.models[model].folder_name
        return root / self.name if several_stages else root


def check_skip(skip: Collection[str], stages: Sequence[Stage]) -> None:
    """Raise ConfigError for an unknown stage to skip."""
    named = [stage.name for stage in stages if stage.name]
    for name in skip:
        if name not in named:
            meant = did_you_mean(name, named) if named else "the settings have no stages"
            raise ConfigError(f"--skip {name}: there is no such stage; {meant}")
    if skip and set(named) <= set(skip):
        raise ConfigError("--skip: every stage is skipped; there is nothing to do")


def split(tree: Tree) -> tuple[Tree, dict[str, Tree]]:
    """Split a file's settings into the common ones and those of each stage."""
    if "stages" not in tree.values:
        return tree, {}
    stages = tree.values["stages"]
    where = tree.origins.get(("stages",), "settings")
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(
            f"{where}: stages must be a mapping of names to settings, such as {{sft: {{method: sft}}, "
            "dpo: {method: dpo, init_from: sft}}"
        )
    common = {key: value for key, value in tree.values.items() if key != "stages"}
    origins = {path: at for path, at in tree.origins.items() if path[:1] != ("stages",)}
    return Tree(common, origins), {name: _own(name, stages[name], tree.origins) for name in stages}


def _own(name: str, values: Any, origins: Mapping[KeyPath, str]) -> Tree:
    """The settings of one stage as a tree."""
    where = origins.get(("stages", name), "settings")
    if not is_name(name, WORD) or name in RESERVED or name.startswith("checkpoint-"):
        raise ConfigError(
            f"{where}: a stage cannot be called {name!r}: the name of its folder has at most {NAME_BYTES} letters, "
            f"digits, `_`, `-` and `.`, and is not {', '.join(RESERVED)} or checkpoint-…"
        )
    if not isinstance(values, dict | None):
        raise ConfigError(f"{where}: the stage {name} must be a mapping of settings such as {{method: sft}}")
    inner = {path[2:]: at for path, at in origins.items() if path[:2] == ("stages", name) and len(path) > 2}
    for key in WHOLE_RUN:
        if key in (values or {}):
            raise ConfigError(f"{inner.get((key,), where)}: {key} belongs to the whole run; set it above the stages")
    return Tree(dict(values or {}), {(): where, **inner})


def take_init_from(trees: Sequence[Tree]) -> tuple[str | None, str]:
    """Remove `init_from` from a stage's trees; returns its last value, and where it was set."""
    init_from, where = None, trees[0].origins.get((), "settings") if trees else ""
    for tree in trees:
        tree.origins.pop((), None)
        at = tree.origins.pop(("init_from",), where)
        if "init_from" in tree.values:
            init_from, where = tree.values.pop("init_from"), at
    if not isinstance(init_from, str | None):
        raise ConfigError(f"{where}: init_from must be the name of one stage")
    return init_from, where


def arranged(
    configs: Mapping[str, RunConfig], init_from: Mapping[str, str | None], where: Mapping[str, str]
) -> tuple[Stage, ...]:
    """The stages in the order in which they run, each with the models that it trains. Raises ConfigError unless each
    stage has as many models as the first, and the same ones if there are several."""
    stages: dict[str, Stage] = {}
    for name in _in_order(init_from, where):
        config, source = configs[name], init_from[name]
        if source is not None:
            config = _start_from(config, stages[source].config, name, where[name])
        stages[name] = Stage(name, source, config)
    first, *others = stages.values()
    names = [model.folder_name for model in first.config.models]
    for stage in others:
        own = [model.folder_name for model in stage.config.models]
        if len(own) != len(names) or (len(own) > 1 and own != names):
            raise ConfigError(
                f"stage {stage.name} has the models {', '.join(own)}, but stage {first.name} {', '.join(names)}: "
                "list all models above the stages; a stage changes their settings, e.g. with model: {lora: true}"
            )
    return tuple(stages.values())


def _in_order(init_from: Mapping[str, str | None], where: Mapping[str, str]) -> list[str]:
    """The stages in the order of the file, but each after the stage that it starts from. Raises ConfigError for an
    `init_from` that names no stage, and for stages that start from one another in a cycle."""
    for name, source in init_from.items():
        if source is not None and source not in init_from:
            raise ConfigError(
                f"{where[name]}: stage {name}: init_from: there is no stage {source}; "
                f"{did_you_mean(source, init_from)} (to start from another model, set model.path)"
            )
    done: list[str] = []
    for name in init_from:
        line: list[str] = []
        step: str | None = name
        while step is not None and step not in done:
            if step in line:
                circle = [*line[line.index(step) :], step]
                raise ConfigError(f"{where[step]}: stages start from one another in a cycle: {' <- '.join(circle)}")
            line.append(step)
            step = init_from[step]
        done += reversed(line)
    return done


def _start_from(stage: RunConfig, source: RunConfig, name: str, where: str) -> RunConfig:
    """The settings of a stage that trains the final models of another stage. Raises ConfigError if the stage names
    different models, which would not be trained, or starts from a reward model without being one."""
    if source.method.head == "reward" and stage.method.head != "reward":
        raise ConfigError(
            f"{where}: stage {name} starts from a reward model, which generates no completions: {stage.method.type} "
            "needs a language model (to use a model as a reward, set rewards: [{type: model, from: STAGE}])"
        )
    own, theirs = [m.folder_name for m in stage.models], [m.folder_name for m in source.models]
    if own != theirs:
        raise ConfigError(
            f"{where}: stage {name} starts from the final model of another stage, but names a different model "
            f"({', '.join(own)} instead of {', '.join(theirs)}); leave out init_from or the model's path and name"
        )
    models = [
        mine.model_copy(update={"path": old.path, "revision": old.revision, "name": old.name})
        for mine, old in zip(stage.models, source.models, strict=True)
    ]
    return stage.model_copy(update={"models": tuple(models)})


def held_out_together(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with `data.excluded` filled in, so that no stage trains on rows that another stage holds out."""
    held = [_held_out(stage.config) for stage in stages]
    return tuple(replace(stage, config=_without(stage.config, held)) for stage in stages)


def _held_out(config: RunConfig) -> HeldOutRows | None:
    """The rows of its training data that a stage holds out for validation; None if there are none."""
    data, validation = config.data, config.data.validation
    if validation is None or not data.holds_out:
        return None
    rows = {name: getattr(data, name) for name in ("source", "split", "max_rows", "skip_rows")}
    return HeldOutRows(**rows, ratio=validation.ratio, rows=validation.rows, seed=config.seed)


def _without(config: RunConfig, held: Sequence[HeldOutRows | None]) -> RunConfig:
    """A stage's settings, excluding the rows that others hold out. Runs of version 1 trained on these rows."""
    if config.behavior_version < 2:
        return config
    excluded = list(config.data.excluded)
    for rows in held:
        if rows is None or rows == _held_out(config):
            continue
        rows = rows.model_copy(update={"seed": None}) if rows.seed == config.seed else rows
        excluded += [rows] if rows not in excluded else []
    return config.model_copy(update={"data": config.data.model_copy(update={"excluded": tuple(excluded)})})
