"""The look of the pages: the project's design, and the rules of `style.css`."""

from pathlib import Path

from posttrain.reports.design import PARTS, TOKENS

CSS = TOKENS + PARTS + Path(__file__).with_name("style.css").read_text(encoding="utf-8")
