"""The pages `/`, `/docs` and `/timeline`.

The chat page at `/` and the timeline hold no data: they use this server's own routes, and prompt their readers for a
key if one is needed.  `/docs`, and `/` with `--no-ui`, are HTML without scripts, which loads nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from html import escape
from http import HTTPStatus
from typing import Any

from slotwise.api.admin.openapi import REFUSED
from slotwise.api.chat_page import page_builder as chat_page
from slotwise.api.generate.context import ServedEngine, ServerClients
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.observe.timeline import page_builder as page
from slotwise.version import __version__

Json = dict[str, Any]
HTML = b"text/html; charset=utf-8"
COMPONENTS = "#/components/schemas/"
LONGEST = 6  # values of an enumeration that are listed
LINKS = (("/docs", "every route and field"), ("/timeline", "the batch, step by step, live"),
         ("/health", "whether requests are accepted"), ("/v1/models", "the model"), ("/metrics", "for Prometheus"),
         ("/openapi.json", "the routes, for machines"))
APIS = {"OpenAI's": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
        "Anthropic's": ("/v1/messages",)}
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 0.9em/1.4 ui-monospace, monospace; }
pre { padding: 0.75rem; overflow-x: auto; border: 1px solid #8886; border-radius: 4px; }
dt { float: left; clear: left; min-width: 10rem; }
dd { margin: 0 0 0.25rem 10rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.15rem 0.75rem 0.15rem 0; border-bottom: 1px solid #8884; }
section { border-top: 1px solid #8886; }
small { color: #888; }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
TRY = """curl {url}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"prompt": "def add(a, b):", "max_tokens": 16}}'"""


@about(media_type="text/html")
async def index(clients: ServerClients, engine: ServedEngine, settings: ServerSettings, exchange: HttpExchange) -> None:
    """The chat page; with `--no-ui` a page with links to the others, and the model's name where no key is needed."""
    if settings.ui:
        await respond_chat(exchange, settings.root_path)
        return
    names = () if clients.keys.needed else engine.models.names
    await respond(exchange, _index(names, settings.root_path))


async def respond(exchange: HttpExchange, page: bytes) -> None:
    """Send a page of this module."""
    await exchange.respond(page, content_type=HTML, headers=[
        (b"content-security-policy", policy()), (b"cache-control", b"no-cache"),
        (b"referrer-policy", b"no-referrer")])


@cache
def policy() -> bytes:
    """Returns the Content-Security-Policy: nothing but the style in the page itself."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return (f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'").encode()


def _page(title: str, body: str) -> bytes:
    return PAGE.format(title=escape(title), style=STYLE, body=body).encode()


@cache
def _index(names: tuple[str, ...], root_path: str) -> bytes:
    served = " or ".join(f"<code>{escape(name)}</code>" for name in names)
    told = f"This server has the model {served}." if names else "This server asks for a key."
    return start_page(told, LINKS, root_path)


def start_page(told: str, links: Sequence[tuple[str, str]], root_path: str) -> bytes:
    """Returns the page at `/`.

    Args:
        told: about the service, as HTML.
        links: paths, each with what is there.
    """
    linked = "".join(f'<dt><a href="{root_path}{path}"><code>{path}</code></a></dt><dd>{what}</dd>'
                     for path, what in links)
    example = escape(TRY.format(url=f"http://HOST{root_path}"))
    apis = " and ".join(f"{owner} API ({', '.join(f'<code>{path}</code>' for path in paths)})"
                        for owner, paths in APIS.items())
    return _page("Slotwise", f"<h1>Slotwise <small>{__version__}</small></h1><div>{told}</div><dl>{linked}</dl>"
                             f"<p>It speaks {apis}:</p><pre>{example}</pre>")


def reference(document: bytes, root_path: str) -> bytes:
    """Returns the page of an OpenAPI document as `server.openapi` makes it."""
    described = json.loads(document)
    schemas = described["components"]["schemas"]
    parts = [f"<h1>Slotwise {escape(described['info']['version'])}</h1>",
             f'<p>Every route, from <a href="{root_path}/openapi.json"><code>/openapi.json</code></a>. '
             f'<a href="{root_path}/">Back</a></p>']
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(f"{method.upper()} {path}", operation, schemas))
    return _page("Slotwise: routes", "\n".join(parts))


def _operation(title: str, operation: Json, schemas: Json) -> str:
    statuses = ", ".join(sorted(operation["responses"]))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    fields = f"<details><summary>Body</summary>{_fields(body, schemas)}</details>" if body else ""
    return (f"<section><h2><code>{escape(title)}</code></h2><p>{escape(operation['summary'])} "
            f"<small>Answers {statuses}.</small></p>{fields}</section>")


def _fields(schema: Json, schemas: Json) -> str:
    schema = schemas[schema["$ref"].removeprefix(COMPONENTS)] if "$ref" in schema else schema
    needed, properties = schema.get("required", ()), schema["properties"]
    obeyed = _table({name: of for name, of in properties.items() if REFUSED not in of}, needed)
    refused = {name: of for name, of in properties.items() if REFUSED in of}
    folded = (f"<details><summary>{len(refused)} more are refused with any value that would change something</summary>"
              f"{_table(refused, needed)}</details>") if refused else ""
    return obeyed + folded


def _table(properties: Json, needed: Collection[str]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' (required)' * (name in needed)}</td>"
        f"<td>{escape(' or '.join(dict.fromkeys(_values(of))))}</td>"
        f"<td>{escape(json.dumps(of['default'])) if 'default' in of else ''}</td></tr>"
        for name, of in properties.items())
    return f"<table><tr><th>field</th><th>values</th><th>default</th></tr>{rows}</table>"


def _values(schema: Json) -> Iterator[str]:
    """Yields the kinds of values that a schema allows."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _values(one)
    elif "enum" in schema:
        values = schema["enum"]
        yield from map(json.dumps, values[:LONGEST])
        if len(values) > LONGEST:
            yield "..."
    elif "$ref" in schema:
        yield schema["$ref"].removeprefix(COMPONENTS)
    elif schema.get("type") == "array":
        inner = " or ".join(dict.fromkeys(_values(schema.get("items") or {})))
        yield f"a list of {inner}"
    else:
        bounds = [f"{word} {schema[name]}" for name, word in (
            ("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to")) if name in schema]
        yield " ".join([schema.get("type", "any"), *bounds])


@about(media_type="text/html")
async def timeline(exchange: HttpExchange) -> None:
    """The live timeline of the batch, step by step, as an HTML page."""
    await respond_timeline(exchange, page.live())


async def respond_timeline(exchange: HttpExchange, document: bytes) -> None:
    """Send a page of `observe.timeline`."""
    await exchange.respond(document, content_type=HTML, headers=[
        (b"content-security-policy", page.policy()), (b"cache-control", b"no-cache"),
        (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")])


async def respond_chat(exchange: HttpExchange, root_path: str, *, is_router: bool = False) -> None:
    """Send the chat page, or 304 to a browser that has it."""
    tag = chat_page.tag(root_path, is_router=is_router)
    headers = [(b"etag", tag), (b"cache-control", b"no-cache"), (b"referrer-policy", b"no-referrer"),
               (b"content-security-policy", chat_page.policy())]
    if tag in dict(exchange.scope["headers"]).get(b"if-none-match", b""):
        await exchange.respond(b"", HTTPStatus.NOT_MODIFIED, HTML, headers)
        return
    await exchange.respond(chat_page.document(root_path, is_router=is_router), content_type=HTML, headers=headers)
