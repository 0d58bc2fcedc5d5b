"""Code quoted in the documentation: a fence with a file's name as its title stands in that file as quoted.

    ```python title="engine/engine.py"
    result = self.executor.collect()
    ...
    self._scheduler.commit(plan, result, ended * 1e-9)
    ```

A line `...` stands for any number of lines; indentation is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from docs.generate.blocks import ROOT

FENCE = re.compile(r'^```\w* title="(?P<file>[^"]+)"\n(?P<code>.*?)^```$', re.DOTALL | re.MULTILINE)
LEFT_OUT = "..."


class Snippet(NamedTuple):
    file: str  # in the package
    code: str

    def missing(self) -> str:
        """Returns the first part that the file does not have, after the parts before it; "" if it has all."""
        path = ROOT / "src" / "slotwise" / self.file
        rest = _stripped(path.read_text()) if path.exists() else []
        for part in self._parts():
            found = next((at for at in range(len(rest)) if rest[at:at + len(part)] == part), None)
            if found is None:
                return "\n".join(part)
            rest = rest[found + len(part):]
        return ""

    def _parts(self) -> Iterator[list[str]]:
        part: list[str] = []
        for line in _stripped(self.code):
            if line == LEFT_OUT:
                yield part
                part = []
            else:
                part.append(line)
        yield part


def snippets(page: str) -> Iterator[Snippet]:
    for fence in FENCE.finditer(page):
        yield Snippet(fence["file"], fence["code"])


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]
