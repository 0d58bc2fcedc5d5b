"""Every module of the package, with the first sentence of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, escaped, first_sentence, table

SOURCE = ROOT / "src" / "slotwise"


def modules() -> str:
    """Returns a section for each package: its modules, and its packages after them."""
    folders = [SOURCE, *sorted(path.parent for path in SOURCE.rglob("*/__init__.py"))]
    parts = []
    for folder in folders:
        rows = [(code(path.name), escaped(_owns(path))) for path in sorted(folder.glob("*.py"))
                if path.name != "__init__.py" or _owns(path)]
        if rows:
            name = folder.relative_to(SOURCE).as_posix()
            parts += [f"## {'slotwise' if folder == SOURCE else name + '/'}", table(("module", "what it owns"), rows)]
    return "\n\n".join(parts)


def _owns(path: Path) -> str:
    return first_sentence(ast.get_docstring(ast.parse(path.read_text())))
