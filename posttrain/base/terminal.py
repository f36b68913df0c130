"""Output to a terminal, a log or a page: strings of any origin are escaped, and its reader may disappear."""

import re
import sys

# For the brackets of a regular expression (of Python, Rust or JSON Schema): the characters that move the cursor,
# colour, beep, write to a clipboard (C0, DEL, C1), break lines invisibly, or change the direction of the text.
CONTROLS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
UNSAFE = re.compile(rf"(?![\t\n])[{CONTROLS}\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with control characters, but not tabs and line breaks, and lone surrogates as escapes (`\x1b`)."""
    return UNSAFE.sub(lambda match: escaped(match[0]), text)


def escaped(text: str) -> str:
    r"""The text with everything but printable ASCII as escapes: `\x1b`, `\r`, `\u202e`."""
    return text.encode("unicode_escape").decode()


def say(text: str, end: str = "\n", error: bool = False) -> None:
    """Print text, on stderr with `error`: the only `print` of the commands; tables go to a console."""
    print(visible(text), end=end, file=sys.stderr if error else sys.stdout, flush=True)
