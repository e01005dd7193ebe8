"""Debian's Chromium, driven by Playwright: for pictures of the page, and for its tests."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-breakpad"),
)
LINK = re.compile(r"http://127\.0\.0\.1:\d+/#[\w-]{43}")
"""To a page, as it is printed."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, until the context ends."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "there is no Chromium: make browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
