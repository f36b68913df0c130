"""Settings as text for people: starter files and the reference table of docs/config.md."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from posttrain.config.data import SourceConfig
from posttrain.config.fields import Setting, all_settings, choices, expected, full, list_choices
from posttrain.config.files import write_yaml
from posttrain.config.methods import METHODS
from posttrain.config.schema import EvaluationDataset

WIDTH = 110
HEADINGS = {
    "run": "The run",
    "model": "Models",
    "method": "Method",
    "data": "Data",
    "training": "Training",
    "evaluation": "Evaluation",
    "checkpoint": "Checkpoints",
    "tracking": "Tracking",
    "devices": "Devices",
    "rollout": "Rollouts",
}
ONLINE = {"model.path": "Qwen/Qwen3-0.6B", "data.source": "gsm8k", "rewards": [{"type": "math"}]}
EXAMPLES: dict[str, dict[str, Any]] = {
    "sft": {"model.path": "Qwen/Qwen3-0.6B-Base", "data.source": "trl-lib/Capybara"},
    "reward": {"model.path": "openai-community/gpt2", "data.source": "Anthropic/hh-rlhf"},
    "dpo": {"model.path": "Qwen/Qwen3-0.6B", "data.source": "trl-lib/ultrafeedback_binarized"},
    "orpo": {"model.path": "Qwen/Qwen3-0.6B-Base", "data.source": "trl-lib/ultrafeedback_binarized"},
    "cpo": {"model.path": "Qwen/Qwen3-0.6B", "data.source": "trl-lib/ultrafeedback_binarized"},
    "simpo": {"model.path": "Qwen/Qwen3-0.6B", "data.source": "trl-lib/ultrafeedback_binarized"},
    "kto": {"model.path": "Qwen/Qwen3-0.6B", "data.source": "trl-lib/kto-mix-14k"},
    "ppo": ONLINE,
    "grpo": ONLINE,
    "rloo": ONLINE,
    "reinforce_plus_plus": ONLINE,
    "ipo": {"model.path": "Qwen/Qwen3-0.6B", "data.source": "trl-lib/ultrafeedback_binarized"},
}
STARTER = (
    "rewards",
    "model.path",
    "model.lora",
    "method.type",
    "method.loss_type",
    "method.beta",
    "method.simpo_gamma",
    "method.cpo_alpha",
    "method.num_generations",
    "method.scale_rewards",
    "method.epsilon",
    "method.cliprange",
    "method.kl_coef",
    "method.desirable_weight",
    "method.undesirable_weight",
    "data.source",
    "data.validation",
    "data.max_length",
    "training.batch_size",
    "training.tokens_per_pack",
    "training.learning_rate",
    "training.num_train_epochs",
    "training.max_steps",
    "evaluation.eval_steps",
    "checkpoint.best_metric",
    "rollout.engine",
    "rollout.temperature",
    "rollout.max_completion_length",
)


def starter(method: str, everything: bool = False) -> str:
    """A commented settings file for a method (`ipo` too): the settings one usually changes, or every one there is."""
    values = {**EXAMPLES[method], "method.type": method}
    if not everything:
        best = "eval_reward" if _online(method) else "eval_loss"
        values |= {"data.validation": {"ratio": 0.05}, "checkpoint.best_metric": best}
    wanted = [s for s in all_settings() if _belongs(s, method) and (everything or s.path in STARTER)]
    lines = [
        f"# Settings of {_article(method)} run. Start it:  posttrain train FILE",
        "# See what it would do:  posttrain plan FILE      What every setting means:  docs/config.md",
    ]
    section = "run"
    for setting in wanted:
        if setting.section != section:
            section = setting.section
            lines += ["", f"{section}:"]
        if setting.path in ("data.tags.reasoning_start", "rollout.vllm.mode"):  # the first of a group within it
            lines.append(f"  {setting.path.split('.')[1]}:")
        value = values.get(setting.path, setting.default)
        lines += _entry(setting, value, method)
    return "\n".join(lines) + "\n"


def _belongs(setting: Setting, method: str) -> bool:
    if method == "ipo" and setting.path == "method.loss_type":
        return False  # `type: ipo` says it
    kind = "dpo" if method == "ipo" else method
    if setting.path.startswith(("rewards", "rollout.")) and not _online(method):
        return False
    inside_group = setting.path.startswith(("model.lora.", "data.validation."))
    return (not setting.methods or kind in setting.methods) and not inside_group


def _online(method: str) -> bool:
    return method in METHODS and METHODS[method].kind == "prompt"


def _entry(setting: Setting, value: Any, method: str) -> list[str]:
    depth = setting.path.count(".")
    key = setting.path.rsplit(".", 1)[-1]
    indent = "  " * depth
    text = f"{indent}{key}: {flow(value)}"
    comment = described(setting)
    lines = [f"{indent}# {line}" for line in _wrapped(comment, WIDTH - len(indent) - 2)]
    if max(len(text), 36) + len(comment) + 4 <= WIDTH:
        lines = [f"{text.ljust(36)}  # {comment}"]
    else:
        lines.append(text)
    if setting.path == "model.lora" and value is None:
        lines.append(f"{indent}# lora: {{r: 16, alpha: 32, dropout: 0.05, target_modules: auto}}")
    return lines


def described(setting: Setting) -> str:
    """The description, with the words that may be given where it does not name them already."""
    words, listed = choices(setting.annotation), list_choices(setting.annotation)
    unnamed = [word for word in (*words, *listed) if word not in setting.description and word not in ("true", "null")]
    if words in (["true", "false"], ["true", "false", "null"]) or len(words) == 1 or not unnamed:
        return setting.description
    return f"{setting.description} {'One' if words else 'Any'} of {', '.join(words or listed)}."


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _article(method: str) -> str:
    return f"an {method}" if method in ("sft", "orpo", "ipo") else f"a {method}"


def flow(value: Any) -> str:
    """A value as it is written on one line of YAML."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, float) and value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) else f"{value:.1f}"
    text = write_yaml(list(value) if isinstance(value, tuple) else value, flow=True)
    return text.removesuffix("\n").removesuffix("\n...")


def settings_reference() -> str:
    """The settings of the schema as Markdown tables, one for each section."""
    parts = []
    settings = all_settings()
    for section, heading in HEADINGS.items():
        rows = [setting for setting in settings if setting.section == section]
        parts.append(f"### {heading}\n\n{_table(rows)}")
        if section == "data":
            parts.append(f"Each entry of `data.source`, when it is a list:\n\n{_entries(SourceConfig)}")
        if section == "evaluation":
            parts.append(f"Each entry of `evaluation.datasets`:\n\n{_entries(EvaluationDataset)}")
    return "\n\n".join(parts) + "\n"


def _table(settings: Iterable[Setting]) -> str:
    lines = ["| setting | default | takes | meaning |", "|---|---|---|---|"]
    for setting in settings:
        default = "required" if setting.required else f"`{flow(setting.default)}`"
        takes = " · ".join(choices(setting.annotation)) or expected(setting.annotation)
        only = f" ({', '.join(setting.methods)} only)" if setting.methods else ""
        lines.append(f"| `{setting.path}` | {default} | {_cell(takes)} | {_cell(setting.description)}{only} |")
    return "\n".join(lines)


def _entries(model: type[BaseModel]) -> str:
    rows = [
        Setting(name, full(info), info.default, info.is_required(), info.description or "")
        for name, info in model.model_fields.items()
    ]
    return _table(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def with_reference(document: str) -> str:
    """The document with what stands between its two `settings` marks replaced by the settings reference."""
    head, begin, rest = document.partition("<!-- settings: begin -->\n")
    _, end, tail = rest.partition("<!-- settings: end -->")
    return f"{head}{begin}\n{settings_reference()}\n{end}{tail}"


if __name__ == "__main__":  # python -m posttrain.config.render docs/config.md
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(with_reference(file.read_text(encoding="utf-8")), encoding="utf-8")
