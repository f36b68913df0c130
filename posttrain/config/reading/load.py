"""Loads a RunConfig from a file or preset, overrides and flags. Precedence: flag, override, file, extended files,
default. Within a file, a stage overrides the common settings."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from posttrain.base.errors import ConfigError
from posttrain.base.files import MOST_DEPTH, path_of
from posttrain.base.words import by_key
from posttrain.config.reading.explain import did_you_mean, dotted, explain, show
from posttrain.config.reading.fields import all_settings
from posttrain.config.reading.files import Tree, read_settings, value_at, write_yaml
from posttrain.config.reading.interpolation import escaped, interpolate
from posttrain.config.reading.layers import ALIASES, Layers, override
from posttrain.config.reading.stages import WHOLE_RUN, Stage, arranged, split, take_init_from
from posttrain.config.schema.methods import METHODS, PPO_NAMES, UnreadMethod, import_method, spell_out
from posttrain.config.schema.run import RunConfig

PRESETS = Path(str(resources.files("posttrain") / "presets"))  # the settings files that come with the package
MOST_FILES = 100  # limit on extended files: if each file extends two others, their number doubles at every step
Assignment = tuple[str, object, str]  # dotted path, value or string to parse, origin


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loaded settings: the stages in the order in which they run (or one unnamed stage), and notes."""

    stages: tuple[Stage, ...]
    notes: list[str]

    @property
    def config(self) -> RunConfig:
        """The settings of a run without stages. Raises ConfigError if there are several."""
        first, *others = self.stages
        if others:
            names = ", ".join(stage.name for stage in self.stages)
            raise ConfigError(f"the settings have several stages ({names}), but a single run is needed here")
        return first.config


class FlagText(str):
    """The value of a flag as typed; `flag` is its name, for messages."""

    flag: str

    def __new__(cls, text: str, flag: str) -> Self:
        made = super().__new__(cls, text)
        made.flag = flag
        return made


def load(
    source: Path | str | Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    imports: bool = False,
) -> Loaded:
    """Read and check a configuration.

    `source` is a YAML or JSON file, the name of a preset, or the settings as a mapping; `overrides` are strings
    `a.b=c`; `flags` maps dotted paths to values (strings are parsed like those of overrides). Overrides and flags apply
    to every stage, or to a single one in the form `stages.NAME.a.b=c`; flags take precedence over both forms of
    override. `imports`: whether to import a user's method and check its settings. Raises ConfigError with all problems.
    """
    common, stages = Layers(), dict[str, list[Tree]]()
    if source is not None:
        trees = [Tree(_plain(source))] if isinstance(source, Mapping) else _chain(find(source))
        for count, tree in enumerate(trees):
            if count == MOST_FILES:
                raise ConfigError(f"{source} extends more than {MOST_FILES} files, counting repeated ones")
            rest, own = split(tree)
            common.lay(rest)
            for name, layer in own.items():
                stages.setdefault(name, []).append(layer)
        if not isinstance(source, Mapping) and _predates_the_record(find(source), common.values, stages):
            common.lay(Tree({"behavior_version": 1}))
    assignments: list[Assignment] = [_assignment(text) for text in overrides]
    from_flags: list[Assignment] = [
        (path, value, value.flag if isinstance(value, FlagText) else f"--{path.replace('_', '-')}")
        for path, value in (flags or {}).items()
    ]
    loaded = _load_stages(common, stages or {"": []}, assignments, from_flags)
    unread = {stage.config.method.type for stage in loaded.stages if isinstance(stage.config.method, UnreadMethod)}
    if not imports or not unread:
        return loaded
    for name in unread:
        import_method(name)
    return load(source, overrides, flags, imports)


def _predates_the_record(path: Path, values: Mapping[str, Any], stages: Mapping[str, Sequence[Tree]]) -> bool:
    """Whether these are saved settings from before `behavior_version` was recorded: of a run, or of a run with several
    models or stages. A user's own `config.yaml` may lie above runs too, but only saved settings are complete."""
    if path.name != "config.yaml" or "behavior_version" in values:
        return False
    own = {key for trees in stages.values() for tree in trees for key in tree.values}
    later = {"behavior_version", "environments", "tools"}
    complete = RunConfig.model_fields.keys() - later <= values.keys() | own
    beside = ("run.json", "state.json", *(("*/run.json", "*/*/run.json") if complete else ()))
    return any(any(path.parent.glob(name)) for name in beside)


def _plain(value: Any, depth: int = 0) -> Any:
    """Convert a Python value to what a file can contain. Raises ConfigError if it is nested deeper than MOST_DEPTH."""
    if depth > MOST_DEPTH:
        raise ConfigError("the settings contain themselves, or are nested too deeply")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return str(value) if isinstance(value, Path) else value


def _lay_assignments(
    layers: Layers, assignments: list[Assignment], from_flags: list[Assignment], own: Sequence[Tree]
) -> list[str]:
    """Merge overrides and flags over the layers. Returns a note for each flag that replaces an explicit value, which is
    one from an override or from `own`, a stage's own settings. All other settings of a file count as defaults."""
    before = layers.copy()
    override(before, assignments)
    override(layers, [*assignments, *from_flags])  # in one call: `method.beta=1` and `--method dpo` belong together
    override(layers, from_flags)  # again: list entries by number were merged last, and flags take precedence over them
    flags = {where for _, _, where in from_flags}
    explicit = {where for _, _, where in assignments} | {where for tree in own for where in tree.origins.values()}
    notes: list[str] = []
    for path, where in before.origins.items():
        flag, old, new = layers.origins.get(path), value_at(before.values, path), value_at(layers.values, path)
        if flag in flags and where in explicit and old != new and not isinstance(new, dict):
            notes.append(f"{flag}: {dotted(path, layers.values)} is {show(new)}, not {show(old)} ({where})")
    return notes


def _load_stages(
    common: Layers, trees: dict[str, list[Tree]], assignments: list[Assignment], from_flags: list[Assignment]
) -> Loaded:
    """Merge each stage's settings over the common ones, and the command line's over both. Settings without stages are
    one stage without a name."""
    own_assignments, own_flags = _by_stage(assignments, trees), _by_stage(from_flags, trees)
    sources: dict[str, str | None] = {}
    where: dict[str, str] = {}
    configs: dict[str, RunConfig] = {}
    notes, unread = list(common.notes), list[str]()
    replaced, wrong = list[tuple[str, str]](), list[tuple[str, str]]()  # lines, each with its stage
    merged = {name: common.copy() for name in trees}
    for name, own in trees.items():
        sources[name], where[name] = take_init_from(own)
        for tree in own:
            merged[name].lay(tree, every_model=True)
    given = {name: [*own_assignments[name], *own_flags[name]] for name in trees}
    common_paths = {path for path, *_ in [*assignments, *from_flags]}
    reads = {path: {name for name in trees if _reads(merged[name], given[name], path)} for path in common_paths}
    for name, own in trees.items():
        layers = merged[name]
        # What is said to all stages is for those that can read it. If none can, it is an error in each.
        own_assignments[name], own_flags[name] = (
            [each for each in some if each not in everywhere or name in (reads[each[0]] or trees)]
            for some, everywhere in ((own_assignments[name], assignments), (own_flags[name], from_flags))
        )
        replaced += [(line, name) for line in _lay_assignments(layers, own_assignments[name], own_flags[name], own)]
        notes += [note for note in layers.notes if note not in notes]
        values = interpolate(layers.values, layers.origins)
        try:
            configs[name] = RunConfig.model_validate(values)
        except ValidationError as error:
            wrong += [(line, name) for line in explain(error, values, layers.origins)]
        else:
            unread += [f"stage {name}: {line}" if name else line for line in configs[name].unread()]
    if wrong:
        lines = _with_stages(wrong, trees)
        all_of_them = f"{len(lines)} settings are wrong:\n" + "\n".join(f"  {line}" for line in lines)
        raise ConfigError(lines[0] if len(lines) == 1 else all_of_them)
    notes = [*notes, *_with_stages(replaced, trees), *unread]
    return Loaded(arranged(configs, sources, where), list(dict.fromkeys(notes)))


def _reads(layers: Layers, given: Sequence[Assignment], path: str) -> bool:
    """Whether a stage with these settings and assignments can read one: a setting of its method, an entry of a list."""
    section, *rest = path.split(".")
    if rest and rest[0].isdecimal():
        return any(name == section for name, *_ in given) or isinstance(layers.values.get(section), list)
    methods = [value for name, value, _ in given if name in ("method", "method.type")]
    method = spell_out(methods[-1] if methods and isinstance(methods[-1], str) else layers.values.get("method"))
    known = METHODS.get(method.get("type", "")) if isinstance(method, dict) else None
    if section != "method" or not rest or known is None:
        return True
    name = ALIASES["method"].get(rest[0], (rest[0],))[0]
    return (PPO_NAMES.get(name, name) if known.name() == "ppo" else name) in known.model_fields


def _with_stages(lines: Sequence[tuple[str, str]], stages: Sized) -> list[str]:
    """Each line once, with the stages that it is about as a prefix, unless it is about all stages."""
    about = by_key(lines)
    return [line if len(at) == len(stages) else f"stage {', '.join(at)}: {line}" for line, at in about.items()]


def _by_stage(assignments: list[Assignment], stages: Mapping[str, list[Tree]]) -> dict[str, list[Assignment]]:
    """The assignments of each stage: those for all stages, then its own. Its `init_from` is added to its trees."""
    by_stage: dict[str, list[Assignment]] = {
        name: [entry for entry in assignments if entry[0].split(".")[0] != "stages"] for name in stages
    }
    for path, value, where in assignments:
        first, *rest = path.split(".")
        if first != "stages":
            continue
        if "" in stages:
            raise ConfigError(f"{where}: the settings have no stages")
        if len(rest) < 2:
            raise ConfigError(f"{where}: give one setting of a stage, such as stages.{next(iter(stages))}.seed=1")
        name, *own = rest
        if name not in stages:
            raise ConfigError(f"{where}: there is no stage {name}; {did_you_mean(name, stages)}")
        if own[0] in WHOLE_RUN:
            raise ConfigError(f"{where}: {own[0]} belongs to the whole run; write {own[0]}=...")
        if own == ["init_from"]:
            stages[name].append(Tree({"init_from": None if value == "null" else value}, {("init_from",): where}))
        else:
            by_stage[name].append((".".join(own), value, where))
    return by_stage


def dump(config: RunConfig | Sequence[Stage]) -> str:
    """The configuration as YAML, which `load` reads back equal. Settings shared by all stages are written once."""
    if isinstance(config, RunConfig):
        return write_yaml(escaped(config.model_dump(mode="json")))
    if len(config) == 1 and not config[0].name:
        return dump(config[0].config)
    each = {stage.name: stage.config.model_dump(mode="json") for stage in config}
    first = each[config[0].name]
    shared = {key: value for key, value in first.items() if all(values[key] == value for values in each.values())}
    stages = {
        stage.name: ({"init_from": stage.init_from} if stage.init_from else {})
        | {key: value for key, value in each[stage.name].items() if key not in shared}
        for stage in config
    }
    return write_yaml(escaped({**shared, "stages": stages}))


def find(source: Path | str) -> Path:
    """Find the file that `source` names: a path, or a preset. Raises ConfigError, which suggests the nearest names."""
    path = path_of(str(source))
    if path.is_file():
        return path
    preset = preset_path(str(source))
    if preset is not None:
        return preset
    if path.is_dir():
        raise ConfigError(f"{source} is a folder; give a YAML or JSON file in it, or a preset")
    if any(f"{setting.path}.".startswith(f"{source}.") for setting in all_settings()):
        raise ConfigError(f"{source} is a setting, not a file or preset: write {source}=VALUE")
    beside = [p for p in path.parent.glob("*") if p.suffix in (".yaml", ".yml", ".json")]
    stems = {p.stem: str(p) for p in beside} | {name: name for name in preset_names()}
    near = [stems[stem] for stem in get_close_matches(path.stem, stems, n=3, cutoff=0.6)]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    presets = "" if near else f"; presets are {', '.join(preset_names())}"
    raise ConfigError(f"there is no file or preset {source}{meant}{presets}")


def _chain(path: Path, seen: tuple[Path, ...] = ()) -> Iterator[Tree]:
    """Yield the settings of every file that this file extends, then its own: the lowest layer first."""
    if path.resolve() in seen:
        raise ConfigError(" extends ".join(map(str, [*seen[seen.index(path.resolve()) :], path])) + ": this is a cycle")
    preset = preset_path(path.stem) == path
    tree = read_settings(path, f"preset {path.stem}" if preset else str(path))
    base = tree.values.pop("extends", None)
    where = tree.origins.get(("extends",), str(path))
    for name in base if isinstance(base, list) else [base] if base is not None else []:
        if not isinstance(name, str):
            raise ConfigError(f"{where}: extends must be a file or preset, or a list of them")
        try:
            beside = path.parent / path_of(name)
            extended = beside if beside.is_file() else find(name) if preset_path(name) else find(beside)
        except ConfigError as error:
            raise ConfigError(f"{where}: extends: {error}") from error
        yield from _chain(extended, (*seen, path.resolve()))
    yield tree


def _assignment(text: str) -> Assignment:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        hint = " (only one configuration file can be given)" if text.endswith((".yaml", ".yml", ".json")) else ""
        raise ConfigError(f"{text!r} is not an override such as training.max_steps=200{hint}")
    return path.strip().removeprefix("--"), value.strip(), f"override {text}"


def preset_names() -> list[str]:
    """The names of all presets, in alphabetical order."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def preset_path(name: str) -> Path | None:
    """The file of a preset, or None."""
    return PRESETS / f"{name}.yaml" if name in preset_names() else None
