"""Photographs the timeline page of a live server: the same requests in static batches, then in continuous ones.

usage: python docs/pictures/timeline.py [--folder DIR]

Starts `slotwise serve` with the built-in model, opens its page in a headless Chromium of the system, and does what a
newcomer would: press the button.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

READY = re.compile(r"Ready after .* on (http://\S+)")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 120  # seconds
WIDE = {"width": 1360, "height": 860}
CLOSE = 44  # steps in the picture of a freed slot


@contextmanager
def served() -> Iterator[str]:
    command = [sys.executable, "-m", "slotwise.cli", "serve", "--port", "0", "--max-num-seqs", "16"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield next(found[1] for line in process.stdout or () if (found := READY.search(line)))
    finally:
        process.terminate()
        process.wait(30)


def until(page: Page, holds: str) -> None:
    for _ in range(PATIENCE * 10):
        if page.evaluate(holds):
            return
        time.sleep(0.1)
    raise SystemExit(f"never: {holds}")


def show(page: Page, first: str, last: str) -> None:
    """Shows the steps whose ordinals the two JavaScript expressions give."""
    page.evaluate(f"slotwise.view.show({first}, {last}); slotwise.changed()")
    page.wait_for_timeout(300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().folder
    browser_path = next(filter(None, map(shutil.which, BROWSERS)))
    with served() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=WIDE, color_scheme="light")
        page.goto(url + "/timeline")
        until(page, "!document.getElementById('empty').hidden")
        page.click("#first")
        until(page, "!document.getElementById('compare').disabled")
        page.wait_for_timeout(500)
        page.screenshot(path=folder / "timeline.png")
        continuous = "slotwise.history.segments.at(-2).first"
        show(page, continuous, f"{continuous} + {CLOSE}")
        x, y = page.evaluate("""() => {
          const { view, layout, history, canvas } = slotwise, first = history.segments.at(-2).first;
          const taken = history.waits.find((wait) => wait.to > first + 14);
          const request = history.requests.get(taken.number), box = canvas.getBoundingClientRect();
          const { top, height } = layout.stripOf[request.slots[0]];
          return [box.left + view.x(taken.to + 0.5), box.top + top + height / 2];
        }""")
        page.mouse.move(x, y)
        page.wait_for_timeout(300)
        page.screenshot(path=folder / "timeline_close.png")
        browser.close()
    for name in ("timeline", "timeline_close"):
        print(f"wrote {folder / name}.png")


if __name__ == "__main__":
    main()
