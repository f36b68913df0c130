"""Extracts the boxed answer of a solution."""

import re

# A box opens, a backslash escapes the next character, a brace opens or closes.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\]+)")


def last_box(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{…}` or `\fbox{…}`, the outer one of nested ones."""
    opened: list[tuple[int, bool]] = []  # of each open brace: the start of its content, and whether it is a box
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and (token == "{" or token.startswith(("\\boxed", "\\fbox"))):
            opened.append((match.end(), token != "{"))
        elif token == "}" and opened:
            begin, box = opened.pop()
            if box:
                last = begin, match.start()
    if last is not None:
        return text[slice(*last)].strip()
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None
