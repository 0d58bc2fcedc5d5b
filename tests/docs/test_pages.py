"""Links of the pages lead somewhere, named files exist, and the site has every page."""

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

PAGES = [*dict.fromkeys((*pages(), *sorted((ROOT / "benchmarks").rglob("*.md")))), ROOT / "training" / "README.md"]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MODULE = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`")
OF_OTHERS = ("torch.py", "vllm/v1/metrics/loggers.py")  # modules named in the source that are not Slotwise's
PACKAGES = {path.name for path in (ROOT / "src" / "slotwise").iterdir() if path.is_dir()}


def prose(page: Path) -> str:
    """What its author wrote: without code and generated blocks."""
    return FENCED.sub("", BLOCK.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", list(pages()), ids=lambda page: page.stem)
def test_named_modules_exist(page: Path) -> None:
    named = {name for name in MODULE.findall(prose(page)) if name.partition("/")[0] in PACKAGES}
    assert not {name for name in named if not (ROOT / "src" / "slotwise" / name).exists()}


def test_what_the_source_names_exists() -> None:
    """Modules named in docstrings and comments, by path (`core/record.py`) or from a top package on (`core.record`)."""
    source = ROOT / "src" / "slotwise"
    files = [path.as_posix() for part in ("src", "tests", "benchmarks") for path in (ROOT / part).rglob("*.py")]
    missing = []
    for module in source.rglob("*.py"):
        for name in re.findall(r"`([a-z_/0-9]+\.py)`", text := module.read_text()):
            if name not in OF_OTHERS and not any(file.endswith(f"/{name}") for file in files):
                missing.append((module.name, name))
        for package, name in re.findall(r"`(?:slotwise\.)?([a-z_]+)\.([a-zA-Z_.]+)`", text):
            if package in PACKAGES | {"server"} and name != "py" and not exists(source / package, name.split(".")):
                missing.append((module.name, f"{package}.{name}"))
    assert not missing


def exists(package: Path, names: list[str]) -> bool:
    """Whether the package has the module, and the module the name."""
    at = package / names[0]
    if at.is_dir():
        return len(names) == 1 or exists(at, names[1:])
    file = at.with_suffix(".py")
    return file.exists() and (len(names) == 1 or re.search(rf"\b{names[1]}\b", file.read_text()) is not None)


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = {ROOT / file for file in files_of(site["nav"])}
    assert set(pages()) <= listed
    assert all(file.exists() for file in listed)


def test_the_readme_can_be_read_in_two_minutes() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) < 700
    assert readme.count("\n- **") == 6, "what is in it: six bullets"
    assert len(re.findall(r"^\d\. \[", readme, re.MULTILINE)) == 5, "read on: five links"


def files_of(nav: object) -> Iterator[str]:
    """The files in a navigation of lists and titles."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from files_of(entry)
