"""The timeline as one self-contained HTML document: it loads no other resource, so it also opens from a file.

The page's ES modules are joined into one script.  Each may import only from modules before it in `MODULES`, and no two
may declare the same name: a browser would reject the script.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources

MODULES = ("runs", "request", "history", "view", "layout", "palette", "pen", "lanes", "queue", "ranks", "gauges",
           "picture", "story", "service", "demo", "save", "hands", "page", "controls", "main")
_IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@cache
def live() -> bytes:
    """Returns the page that follows the server it was loaded from."""
    return _document("").encode()


@cache
def of_router() -> bytes:
    """Returns the page that follows a replica of the router that it was loaded from, and offers the others."""
    return _document('<template id="router"></template>').encode()


def saved(name: str, lines: Iterable[bytes]) -> bytes:
    """Returns the page with an embedded event log.

    Args:
        name: of the log.
        lines: its entries, one JSON object each.
    """
    packed = base64.b64encode(gzip.compress(b"".join(lines), 6)).decode()
    log = f'<script type="application/gzip" id="log" data-name="{html.escape(name)}">{packed}</script>'
    return _document(log).encode()


@cache
def policy() -> bytes:
    """Returns the live page's Content-Security-Policy: only its own script, style and server."""
    return (f"default-src 'none'; script-src {_digest(_script())}; style-src {_digest(_style())}; "
            "style-src-attr 'unsafe-inline'; connect-src 'self'; img-src data: blob:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'").encode()


def _digest(part: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"


def _document(log: str) -> str:
    parts = {"style": _style(), "script": _script(), "log": log}
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: parts[found[1]], _asset("page.html"))


@cache
def _style() -> str:
    return _asset("page.css")


@cache
def _script() -> str:
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _asset(f"{name}.js"))) for name in MODULES)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")
