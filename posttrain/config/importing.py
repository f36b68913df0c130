"""Settings of other systems as a settings file of posttrain, with comments where a value means something else."""

from math import ceil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from posttrain.base.errors import ConfigError
from posttrain.base.terminal import visible
from posttrain.base.words import by_key
from posttrain.config.foreign import SYSTEMS, Draft, Source, lay_data, method_of, table
from posttrain.config.reading.explain import explain
from posttrain.config.reading.fields import all_settings, known_paths
from posttrain.config.reading.hints import hint, target
from posttrain.config.reading.interpolation import escaped
from posttrain.config.reading.layers import Layers, override
from posttrain.config.render import WIDTH, commented, flow, wrapped
from posttrain.config.schema.methods import METHOD_NAMES, METHODS, PPO_NAMES, class_of
from posttrain.config.schema.run import RunConfig

_NO = (None, False, "", "no", "none")


def convert(source: Source, method: str | None = None) -> Draft:
    """The settings that stand for what a source says. Raises ConfigError if the method is not known, or for a value of
    the wrong type, with its place."""
    given = {name: value for name, value in source.values.items() if value is not None}
    named = [given.pop(name) for name in ("stage", "rl", "post_training", "method") if name in given]
    told = method or source.method or next(iter(named), None) or _told_by_names(source.system, given)
    known = method_of(str(told).lower())
    if known is None:
        said = f"says {told!r}, which is no method here" if told else "does not say its method"
        raise ConfigError(f"{source.name} {said}; give one with --method: {', '.join(METHOD_NAMES)}")
    if known == "dpo" and given.get("pref_loss") in ("orpo", "simpo"):
        known = given.pop("pref_loss")
    system = table(source.system)
    rest = system.get("defaults", {}) | system.get("by_method", {}).get(class_of(known).name(), {})
    if given.keys() & {"warmup_steps", "warmup_ratio"}:  # two names of one setting
        rest = {name: value for name, value in rest.items() if not name.startswith("warmup_")}
    draft = Draft(source, known, rest | given)
    draft.put("method.type", known)
    draft.left |= dict.fromkeys(source.repeated, "several sections give it; write the one that is meant")
    if source.system == "trl" and source.values.get("max_length", 0) is None:
        draft.left["max_length"] = "null is no limit there; data.max_length is a number, 1024 if it is left out"
    for step in (_folders, _batch, _adapter, lay_data, _losses, _rewards, _evaluation):
        step(draft)
    for name, value in draft.rest.items():
        _carry(draft, name, value)
    _make_room(draft)
    return draft


def _told_by_names(system: str, given: dict[str, Any]) -> str | None:
    """The method that alone has all the settings that are methods' settings. Some systems train SFT by default."""
    if system in ("llama-factory", "axolotl"):
        return "reward" if given.get("reward_model") is True else "sft"
    of_methods = {name for name in given for kind in METHODS.values() if name in kind.model_fields}
    able = [name for name, kind in METHODS.items() if of_methods <= kind.model_fields.keys()]
    return able[0] if of_methods and len(able) == 1 else None


def _folders(draft: Draft) -> None:
    folder = draft.take("output_dir")
    if folder and Path(folder := str(folder)).name:
        draft.put("name", Path(folder).name, "output_dir", "last part of output_dir; the model is in its final/")
        draft.put("output_dir", str(Path(folder).parent), "output_dir")
        draft.left |= {run: "name is that of output_dir" for run in ("run_name", "wandb_name") if draft.take(run)}


def _batch(draft: Draft) -> None:
    size = draft.whole("per_device_train_batch_size", "micro_batch_size", "train_batch_size", "batch_size")
    accumulated = draft.whole("gradient_accumulation_steps", "grad_accum", "grad_accum_steps") or 1
    rounds, buffer = draft.whole("steps_per_generation"), draft.whole("generation_batch_size")
    if size is None:
        return
    devices, group = draft.source.devices, draft.rest.get("num_generations")
    comment = f"{size} per device x {accumulated} accumulated x {devices} device{'s' * (devices > 1)}"
    per_device, size = size * devices, size * devices * accumulated
    counts_completions = draft.source.system in ("trl", "axolotl") and draft.method in ("grpo", "rloo")
    if counts_completions and isinstance(group, int) and group > 0:
        sampled = buffer or per_device * (rounds or accumulated)
        draft.put("method.num_minibatches", max(1, sampled // size), "steps_per_generation")
        size, comment = ceil(sampled / group), f"{sampled} completions ({comment}) / {group} of each prompt"
        comment += ", rounded up" if sampled % group else ""
    draft.put("training.batch_size", size, comment=comment)


def _adapter(draft: Draft) -> None:
    kind = draft.take("finetuning_type", "adapter")
    on = kind in ("lora", "qlora") if kind else bool(draft.take("use_peft", "use_lora", "peft"))
    if not on and draft.source.system == "other":
        on = any(name.startswith("lora_") for name in draft.rest)
    if kind not in (None, "lora", "qlora", "full"):
        draft.left[str(kind)] = "not supported: all weights are trained; model.lora is the adapter here"
    if draft.rest.get("quantization_bit") not in (None, 4):
        draft.take("quantization_bit")
        draft.left["quantization_bit"] = hint("load_in_8bit") or ""
    if not on:
        for name in list(draft.rest):
            if _path(draft, name)[0].startswith(("model.lora.", "model.load_in_4bit")):
                draft.leave(name, "no effect there, because no adapter is trained")
                del draft.rest[name]
        return
    rank, targets = draft.rest.get("lora_rank"), draft.rest.get("lora_target")
    if draft.source.system == "llama-factory" and isinstance(rank, int):
        draft.rest.setdefault("lora_alpha", 2 * rank)
    iterations = draft.take("pissa_iter") or 16  # LLaMA-Factory's default; -1 is the whole SVD
    if draft.take("pissa_init"):
        draft.put("model.lora.init", "pissa" if iterations == -1 else f"pissa_niter_{iterations}", "pissa_init")
    if isinstance(targets, str) and targets != "all":
        draft.rest["lora_target"] = [part.strip() for part in targets.split(",")]
    if not any(draft.rest.get(name) for name in ("lora_target", "lora_target_linear", "lora_target_modules")):
        draft.put("model.lora.target_modules", "auto", comment="PEFT's modules for the family may be fewer")


def _losses(draft: Draft) -> None:
    if share := draft.take("pref_ftx", "rpo_alpha"):
        draft.put("method.loss_type", [draft.take("loss_type", "pref_loss") or "sigmoid", "sft"])
        draft.put("method.loss_weights", [1.0, share], comment="of the two losses")
    if draft.method == "grpo" and draft.rest.get("beta"):
        draft.rest.setdefault("use_bias_correction_kl", True)  # TRL's default


def _rewards(draft: Draft) -> None:
    known = table("trl")["rewards"]
    functions, weights = draft.take("reward_funcs", "reward_fn") or [], draft.take("reward_weights")
    model = draft.take("reward_model_path", "reward_model", "reward_model_name_or_path")
    entries: list[dict[str, Any]] = (
        [{"type": "model", "path": str(model)}] if model not in _NO and model is not True else []
    )
    for function in functions if isinstance(functions, list) else [functions]:
        module, _, name = str(function).replace(":", ".").rpartition(".")
        if module:
            entries.append({"type": "python", "function": f"{module}:{name}", "name": name})
        elif function in known:
            entries.append(known[function])
        else:
            draft.left[str(function)] = f"no reward here has this name; {hint('reward_funcs')}"
    if isinstance(weights, list) and len(weights) == len(entries):
        entries = [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    elif weights is not None:
        draft.left["reward_weights"] = "not one for each reward that is carried"
    if entries:
        draft.put("rewards", entries, comment="functions are called as TRL calls them")


def _evaluation(draft: Draft) -> None:
    for name in ("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy"):
        if (strategy := draft.take(name)) not in (*_NO, "steps"):
            draft.left[name] = f"{strategy}: not supported; intervals are numbers of steps"
    best, metric = draft.take("load_best_model_at_end"), draft.take("metric_for_best_model")
    if best or metric:
        metric = f"eval_{str(metric or 'loss').removeprefix('eval_')}"
        draft.put("checkpoint.best_metric", metric, "metric_for_best_model")
    if draft.source.system == "trl" and draft.method in ("grpo", "rloo"):
        draft.rest.setdefault("num_generations_eval", draft.rest["num_generations"])  # TRL's default
    if draft.rest.get("wandb_project"):
        draft.put("tracking.report_to", ["wandb"], "wandb_project")


def _path(draft: Draft, name: str) -> tuple[str, str | None, str]:
    """The setting that a name stands for ("" if none does), the word that it takes if true, and a comment."""
    known = known_paths()
    paths = known.get(name, [])
    if name in draft.kind.model_fields:
        return f"method.{name}", None, ""
    if paths:
        return next((path for path in paths if not path.startswith("evaluation.") or path == paths[-1]), ""), None, ""
    path, word, comment = target(name) or ("", None, "")
    if draft.method == "ppo" and path.startswith("method."):
        path = f"method.{PPO_NAMES.get(path[7:], path[7:])}"
    return (path if path in known.get(path.rpartition(".")[2], ()) else ""), word, comment


def _carry(draft: Draft, name: str, value: Any) -> None:
    path, word, comment = _path(draft, name)
    off = word is not None and value in _NO
    if off and name == "bf16" and not draft.source.values.get("fp16"):
        off, word = False, "float32"
    if off or not path:
        draft.leave(name, "off, as here" if value is False else hint(name) or "unknown to posttrain")
        return
    if word is not None:
        value = {"true": True, "false": False}.get(word, word)
    for values in (table("values").get(name, {}), table("values").get(path, {})):
        value = values.get(flow(value), value) if isinstance(value, str | int) else value
    if name == "max_tool_calling_iterations" and isinstance(value, int):
        value += 1
    draft.put(path, value, name, comment)


def _make_room(draft: Draft) -> None:
    """Lengths that only posttrain limits: of a pack, which holds a whole pair, and of a prompt with its completion."""
    length, completion = draft.settings.get("data.max_length"), draft.settings.get("rollout.max_completion_length", 512)
    if draft.kind.samples_completions and isinstance(completion, int):
        prompts = completion if draft.source.system == "trl" or not isinstance(length, int) else length
        if draft.source.system != "other":
            comment = "prompt and completion; only completions are limited there"
            draft.put("data.max_length", max(1024, prompts + completion), comment=comment)
    elif isinstance(length, int) and 2 * length > 8192 and draft.kind.kind in ("pair", "unpaired"):
        draft.put("training.tokens_per_pack", 2 * length, comment="a pack holds whole pairs")


def settle(draft: Draft) -> None:
    """Keep what posttrain takes: other values move to `left`; what is missing is in `lacks`. Raises ConfigError for a
    value of the wrong type, with its place."""
    known = {s.path: s.default for s in all_settings() if not s.methods or draft.kind.name() in s.methods}
    order, said = {path: number for number, path in enumerate(known)}, {"", *draft.source.values}
    reported = draft.lacks
    draft.settings = {
        path: value
        for path, value in sorted(draft.settings.items(), key=lambda item: order.get(item[0], len(order)))
        if draft.names[path] in said or (path, value) not in known.items()
    }
    while True:
        layers, taken = Layers(), draft.settings.items()
        override(layers, [(path, flow(value) if isinstance(value, str) else value, "") for path, value in taken])
        try:
            RunConfig.model_validate(layers.values)
            problems = []
        except ValidationError as error:
            problems = [line.split(" ", 1) for line in explain(error, layers.values, {})]
        draft.lacks = [*reported, *(f"{at} {text}" for at, text in problems)]
        wrong = {
            path: text
            for at, text in problems
            for path in draft.settings
            if f"{path}.".startswith(f"{at}.") or f"{at}.".startswith(f"{path}.")
        }
        if not wrong:
            return
        for path, text in wrong.items():
            name = draft.names[path]
            if "; it must be " in text and "one of" not in text:  # a value of the wrong type
                raise ConfigError(f"{draft.source.places.get(name, draft.source.name)}: {name} {text}")
            draft.leave(name, f"{path} {text}")
            del draft.settings[path]


def written(draft: Draft) -> str:
    """The settings file: commented settings, then what is missing, and the names that are not carried with reasons."""
    lines = [f"# From {visible(draft.source.name)} ({SYSTEMS[draft.source.system]}), by: posttrain config import"]
    above: list[str] = []
    for path, value in draft.settings.items():
        *sections, key = path.split(".")
        new = next((n for n, name in enumerate(sections) if above[n : n + 1] != [name]), len(sections))
        lines += [f"{'  ' * n}{name}:" for n, name in enumerate(sections) if n >= new]
        above, indent = sections, "  " * len(sections)
        lines += commented(f"{indent}{key}: {flow(escaped(value))}", draft.comments[path], indent)
    reasons = by_key((reason, name) for name, reason in draft.left.items())
    not_carried = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    for heading, notes in (("Still missing", draft.lacks), ("Not carried", not_carried)):
        lines += ["", f"# {heading}:"] if notes else []
        lines += ["# - " + "\n#   ".join(wrapped(visible(note), WIDTH - 4)) for note in notes]
    return "\n".join(lines) + "\n"
