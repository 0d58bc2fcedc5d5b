"""Generated parts of the documentation are what the code says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `docs` is run from the repository's root and never installed

from docs.generate.blocks import BLOCK, COMMAND, pages, renewed  # noqa: E402
from docs.generate.contents import BLOCKS  # noqa: E402
from docs.generate.markdown import first_sentence, sentence, table  # noqa: E402

EMPTY_CELL = re.compile(r"^\| `([^`]+)` \|.*\|  \|", re.MULTILINE)


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: page.stem)
def test_generated_blocks_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert renewed(text, BLOCKS) == text, f"{page.relative_to(ROOT)} is out of date: run `{COMMAND}`"


def test_every_block_is_on_a_page() -> None:
    used = [block["name"] for page in pages() for block in BLOCK.finditer(page.read_text())]
    assert sorted(used) == sorted(BLOCKS)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.stem)
def test_every_field_has_a_meaning(page: Path) -> None:
    unexplained = EMPTY_CELL.findall(page.read_text())
    assert not unexplained, "write a comment beside these fields in their classes"


def test_a_block_is_replaced_and_the_text_around_it_is_kept() -> None:
    page = "before\n<!-- generated: a -->\nold\n<!-- end -->\nafter\n"
    after = renewed(page, {"a": lambda: "new"})
    assert after == "before\n<!-- generated: a -->\n\nnew\n\n<!-- end -->\nafter\n"
    assert renewed(after, {"a": lambda: "new"}) == after
    with pytest.raises(KeyError):
        renewed(page, {})


def test_cells_are_sentences() -> None:
    assert sentence("seconds; 0:  none") == "Seconds; 0: none."
    assert sentence("a | b in <name>, not in `<name>`") == r"A \| b in &lt;name>, not in `<name>`."
    assert sentence("max_tokens of a choice") == "max_tokens of a choice."
    assert first_sentence("One thing.  And another.\n\nMore.") == "One thing."
    assert table(("a", "b>"), [("1", "2")]) == "| a | b |\n| --- | --: |\n| 1 | 2 |"
