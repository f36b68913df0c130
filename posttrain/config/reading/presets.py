"""The settings files that come with the package."""

from importlib import resources
from pathlib import Path


def preset_names() -> list[str]:
    """The names of all presets, in alphabetical order."""
    folder = resources.files("posttrain") / "presets"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def preset_path(name: str) -> Path | None:
    """The file of a preset, or None."""
    if name not in preset_names():
        return None
    return Path(str(resources.files("posttrain") / "presets" / f"{name}.yaml"))


def preset_summary(name: str) -> str:
    """The summary of a preset: the comment on its first line."""
    path = preset_path(name)
    assert path is not None, name
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ").strip()
