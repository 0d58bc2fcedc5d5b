"""Generated blocks of pages.  A page contains what its author wrote, and between two comments

    <!-- generated: NAME -->
    ...
    <!-- end -->

what the function of that name returns.  `python -m docs.generate` renews every block; a test fails while one differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m docs.generate"
BLOCK = re.compile(r"(?P<begin><!-- generated: (?P<name>[\w -]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def pages() -> Iterator[Path]:
    """Yields every page that may have generated blocks: the README, the documentation and the measured results."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "benchmarks" / "results").glob("*.md"))


def renewed(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Returns a page with its blocks renewed.  Raises KeyError for a block without a function."""
    return BLOCK.sub(lambda block: f"{block['begin']}\n{blocks[block['name']]()}\n\n{block['end']}", text)
