"""Pages: quoted code stands in the files, links lead somewhere, and named files exist."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `docs` is run from the repository's root and never installed

from docs.generate.blocks import BLOCK, pages  # noqa: E402
from docs.generate.snippets import Snippet, snippets  # noqa: E402

PAGES = [*pages(), *sorted((ROOT / "benchmarks").rglob("*.md")), ROOT / "training" / "README.md"]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MODULE = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`")
PACKAGES = {path.name for path in (ROOT / "src" / "slotwise").iterdir() if path.is_dir()}
LONGEST = 5  # lines of a paragraph


def prose(page: Path) -> str:
    """What its author wrote: without code and generated blocks."""
    return FENCED.sub("", BLOCK.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def paragraphs(text: str) -> Iterator[list[str]]:
    for part in text.split("\n\n"):
        lines = part.strip().splitlines()
        if lines and not lines[0].lstrip().startswith(("|", "#", "-", "*", "<", ">", "!", "1.")):
            yield lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: page.stem)
def test_code_stands_in_the_files_as_quoted(page: Path) -> None:
    for snippet in snippets(page.read_text()):
        assert not (part := snippet.missing()), f"{snippet.file} has changed, quote it anew:\n{part}"


def test_a_quote_that_differs_is_found() -> None:
    assert not Snippet("engine/engine.py", "class Engine:\n...\n    def step(self) -> StepRecord:\n").missing()
    assert Snippet("engine/engine.py", "class Engine:\n    def step(self) -> StepRecord:\n").missing()
    assert Snippet("engine/engine.py", "def step(self) -> StepRecord:\n...\nclass Engine:").missing() == "class Engine:"
    assert Snippet("engine/no_such_file.py", "class Engine:\n").missing()


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: page.stem)
def test_named_modules_exist(page: Path) -> None:
    named = {name for name in MODULE.findall(prose(page)) if name.partition("/")[0] in PACKAGES}
    assert not {name for name in named if not (ROOT / "src" / "slotwise" / name).exists()}


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = {ROOT / file for file in files_of(site["nav"])}
    assert set(pages()) <= listed
    assert all(file.exists() for file in listed)


def files_of(nav: object) -> Iterator[str]:
    """The files in a navigation of lists and titles."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from files_of(entry)


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: page.stem)
def test_paragraphs_are_short(page: Path) -> None:
    long = [lines[0] for lines in paragraphs(prose(page)) if len(lines) > LONGEST]
    assert not long, f"paragraphs of more than {LONGEST} lines"
