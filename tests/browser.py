"""A real browser for the tests marked `ui`: pages that fail on console errors and on requests to other hosts.

`make test-ui` runs them; it needs a Chromium, $CHROMIUM or `chromium` on the PATH.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

SAVED = Path(__file__).parent / "saved_run/run"  # a run that trained
PICTURES = Path(os.environ.get("UI_PICTURES", Path(__file__).parent.parent / "build/ui"))
INSTALL = "no Chromium: set $CHROMIUM, or install one: sudo apt-get install chromium"
SIZES = {"light": (1280, 900), "dark": (1280, 900), "phone": (390, 844)}


def chromium() -> str | None:
    """The browser's program."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def a_browser() -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.fail(INSTALL)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched(browser: Browser, mode: str = "light", forgiven: Sequence[str] = (), file: str = "") -> Iterator[Page]:
    """A page in light, dark or phone size. At its end: no console error but `forgiven`, no request to another host.

    `file`: the address of a file that may be opened, and nothing besides it.
    """
    width, height = SIZES[mode]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if mode == "dark" else "light"
    )
    context.set_default_timeout(15_000)
    page, errors, elsewhere = context.new_page(), [], []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda asked: elsewhere.append(asked.url) if _foreign(asked.url) and asked.url != file else None)
    yield page
    context.close()
    assert [error for error in errors if not any(words in error for words in forgiven)] == [], "console errors"
    assert elsewhere == [], "requests to other hosts"


def photograph(page: Page, path: Path, whole: bool = False) -> Path:
    """A picture of the page, for eyes; without moving cursors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page.mouse.move(0, 0)
    page.screenshot(path=path, full_page=whole, animations="disabled", caret="hide")
    return path


def fits(page: Page) -> bool:
    """Whether the page is no wider than its window: only tables scroll sideways, inside."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def _foreign(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob", "about") and parts.hostname != "127.0.0.1"
