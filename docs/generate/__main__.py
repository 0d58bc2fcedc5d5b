"""Renews the generated blocks of all pages: `python -m docs.generate`, from the repository's root."""

from __future__ import annotations

from docs.generate.blocks import ROOT, pages, renewed
from docs.generate.contents import BLOCKS

for page in pages():
    before = page.read_text()
    if (after := renewed(before, BLOCKS)) != before:
        page.write_text(after)
        print(page.relative_to(ROOT))
