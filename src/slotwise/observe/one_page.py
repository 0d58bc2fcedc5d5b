"""HTML pages of one document: the assets of packages joined into one style and one script, and the digests of a policy.

A page's ES modules become one script.  Each may import only from modules before it in the list, and no two may declare
the same name: a browser would reject the script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import NamedTuple

_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_PART = re.compile(r"\{\{ (\w+) \}\}")


class Asset(NamedTuple):
    """A text file that a package ships."""

    package: str
    path: str  # below the package's folder

    def read(self) -> str:
        return resources.files(self.package).joinpath(*self.path.split("/")).read_text("utf-8")


def joined(modules: Iterable[Asset]) -> str:
    """Returns ES modules as one script, in their order."""
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", module.read())) for module in modules)


def filled(document: str, parts: Mapping[str, str]) -> str:
    """Returns a document whose places, as `{{ name }}`, are filled with `parts`."""
    return _PART.sub(lambda found: parts[found[1]], document)


def digest(part: str) -> str:
    """Returns a script or style as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
