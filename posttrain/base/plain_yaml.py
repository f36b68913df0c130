"""Reads YAML as plain data, with the C library: a list of runs reads hundreds of files."""

from typing import Any

MOST_DEPTH = 100  # of lists and mappings in one another: the C library would overflow the stack


def read_yaml(text: str) -> Any:
    """The plain values of a document. Raises ValueError if it is not YAML, is nested too deeply, or has tags or
    aliases, which can multiply without bound: posttrain writes neither."""
    import yaml  # rarely needed for a list

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise ValueError("it is nested too deeply")
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
                raise ValueError(f"it has a tag or alias on line {event.start_mark.line + 1}")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError) as error:
        if is_too_deep(error):
            raise ValueError("it is nested too deeply") from error
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from error


def is_too_deep(error: Exception) -> bool:
    """Whether YAML could not be read because of its depth, which PyYAML limits since 6.0.4."""
    return isinstance(error, RecursionError) or "maximum nesting depth" in str(error)
