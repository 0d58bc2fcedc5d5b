"""A headless Chromium of the system, for pages that have to be seen to be tested."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The headless shell first: it is Chromium without the desktop browser around the pages, and takes half the CPU time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    """Where the system's Chromium is, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser() -> Iterator["playwright.sync_api.Browser"]:  # noqa: F821, UP037 - imported only where it is used
    """A running browser; the test is skipped, and says so, where the system has none."""
    path = executable()
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)} is installed")
    from playwright.sync_api import expect, sync_playwright
    expect.set_options(timeout=60_000)  # milliseconds: how long a page takes proves nothing
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield running
        finally:
            running.close()


@contextmanager
def opened(running, page_file: Path, *, width: int = 1280, dark: bool = False):
    """The page of a file at a width in pixels, and everything that its console or the network complained about."""
    page = running.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else complaints.append(
        f"fetched {request.url}"))
    try:
        page.goto(page_file.resolve().as_uri())
        yield page, complaints
    finally:
        page.close()
