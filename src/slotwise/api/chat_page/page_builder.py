"""The chat page as one HTML document: a style, the two libraries of `vendored/`, and a script.

The page holds no data.  It uses this server's own routes, prompts for a key where one is needed, and keeps
conversations in the browser.  Model output becomes HTML by marked, and of that DOMPurify lets through what text needs.
The policy runs no other script, loads nothing from anywhere, and lets no text become HTML by another path (Trusted
Types).
"""

from __future__ import annotations

import hashlib
from functools import cache
from html import escape

from slotwise.observe.one_page import Asset, digest, filled, joined
from slotwise.observe.timeline.page_builder import BASE_STYLE, SERVICE

LIBRARIES = ("marked.umd.js", "purify.min.js")
MODULES = ("dom", "markdown", "store", "stream", "facts", "answer", "settings", "panel", "server", "conversation",
           "main")


@cache
def document(root_path: str, *, is_router: bool = False) -> bytes:
    """Returns the page.

    Args:
        root_path: the path below which a reverse proxy shows this server; "": none is known.
        is_router: several replicas stand behind this address.
    """
    parts = {"style": _style(), "script": _script(), "root": escape(root_path),
             "router": "router" if is_router else "",
             "libraries": "\n".join(f"<script>{library}</script>" for library in _libraries())}
    return filled(_asset("page.html").read(), parts).encode()


@cache
def tag(root_path: str, *, is_router: bool = False) -> bytes:
    """Returns the page's ETag, which changes with its content."""
    return b'"%b"' % hashlib.sha256(document(root_path, is_router=is_router)).hexdigest()[:32].encode()


@cache
def policy() -> bytes:
    """Returns the page's Content-Security-Policy."""
    scripts = " ".join(digest(script) for script in (*_libraries(), _script()))
    return (f"default-src 'none'; script-src {scripts}; style-src {digest(_style())}; connect-src 'self'; "
            "img-src data:; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'; trusted-types dompurify").encode()


@cache
def _style() -> str:
    return BASE_STYLE.read() + _asset("page.css").read()


@cache
def _libraries() -> tuple[str, ...]:
    return tuple(Asset(__package__, f"vendored/{name}").read() for name in LIBRARIES)


@cache
def _script() -> str:
    return joined([SERVICE, *(_asset(f"{name}.js") for name in MODULES)])


def _asset(name: str) -> Asset:
    return Asset(__package__, f"assets/{name}")
