"""Text from anywhere (data, completions, names, errors) made fit for a terminal, a log and a page."""

import re
import sys

# Inside the brackets of a regular expression (of Python, Rust or JSON Schema): the characters that move a cursor,
# colour, beep, write to a clipboard (C0, DEL, C1), break lines unseen, or turn the direction of the text around them.
CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
UNSAFE = re.compile(rf"(?![\t\n])[{CONTROLS}\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with control characters and lone surrogates as their escapes (`\x1b`, `\r`, `\u202e`).

    Tabs and line breaks stay.
    """
    return UNSAFE.sub(lambda found: escaped(found[0]), text)


def escaped(text: str) -> str:
    r"""What is not printable ASCII as its escapes: `\x1b`, `\r`, `\u202e`."""
    return text.encode("unicode_escape").decode()


def say(text: str, end: str = "\n", error: bool = False) -> None:
    """Print text, on stderr with `error`: the only `print` of what commands say (tables go to a console)."""
    print(visible(text), end=end, file=sys.stderr if error else sys.stdout, flush=True)
