"""The page of every route, made from the OpenAPI document: an index, fields, and a form that sends a request."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

from slotwise.api.admin.html import shell
from slotwise.api.admin.openapi import AREAS, COMMON, PAGES, REFUSED, place_of

Json = dict[str, Any]
COMPONENTS = "#/components/schemas/"
LONGEST = 6  # values of an enumeration that are listed
FEW = 14  # fields that are shown without folding any


@cache
def script() -> str:
    """Returns the script of the page."""
    return shell.asset("try_route.js")


def page(document: bytes, root_path: str) -> bytes:
    """Returns the page of an OpenAPI document as `openapi.document` makes it."""
    described = json.loads(document)
    areas: dict[str, list[tuple[str, str, Json]]] = {area: [] for area in (*AREAS, PAGES)}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            areas[operation["tags"][0]].append((method.upper(), path, operation))
    jumps, sections = [], []
    for area, routes in areas.items():
        if routes:
            routes.sort(key=lambda route: place_of(route[1]))
            jumped = "".join(_jump(method, path) for method, path, _ in routes)
            jumps.append(f"<li>{escape(area)}<ul>{jumped}</ul></li>")
            sections.append(f"<h2>{escape(area)}</h2>" + "".join(
                _route(*route, described["components"]["schemas"]) for route in routes))
    links = "".join(f'<a href="{root_path}{path}">{text}</a>' for path, text in (
        ("/", "home"), ("/links", "links"), ("/timeline", "timeline"), ("/openapi.json", "openapi.json")))
    return shell.page("Slotwise: routes", (
        f'<header><h1>Slotwise <small>{escape(described["info"]["version"])}</small></h1><nav aria-label="Pages">'
        f'{links}</nav><form class="end" id="door"><label>API key <input id="key" type="password" autocomplete="off" '
        f'placeholder="where one is needed"></label></form></header><div class="columns">'
        f'<nav class="jump" aria-label="Routes"><details open><summary>Routes</summary><ul>{"".join(jumps)}</ul>'
        f"</details></nav><main>{''.join(sections)}</main></div>"), script())


def _anchor(method: str, path: str) -> str:
    return f"{method} {path}".replace(" ", "").replace("{", "").replace("}", "")


def _jump(method: str, path: str) -> str:
    return (f'<li><a href="#{_anchor(method, path)}"><span class="method">{method}</span> '
            f"<code>{escape(path)}</code></a></li>")


def _route(method: str, path: str, operation: Json, schemas: Json) -> str:
    statuses = ", ".join(sorted(operation["responses"]))
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    fields = (f"<details><summary>Fields of the body</summary>{_fields(content['schema'], schemas)}</details>"
              if content else "")
    return (f'<section id="{_anchor(method, path)}"><h3><code>{method} {escape(path)}</code></h3>'
            f"<p>{escape(operation['summary'])} <small>Answers {statuses}.</small></p>{fields}"
            f'<details class="try" {_data(method, path, operation, content)} hidden><summary>Try it</summary>'
            "</details></section>")


def _data(method: str, path: str, operation: Json, content: Json) -> str:
    """Returns what the form is made from, as attributes."""
    data: dict[str, Any] = {"method": method, "path": path, "parameters": [
        {"name": one["name"], "in": one["in"], "values": one["schema"].get("enum", [])}
        for one in operation.get("parameters", ())]}
    if content:
        data["body"] = content.get("example", {})
    return f'data-route="{escape(json.dumps(data))}"'


def _fields(schema: Json, schemas: Json) -> str:
    schema = schemas[schema["$ref"].removeprefix(COMPONENTS)] if "$ref" in schema else schema
    needed, properties = schema.get("required", ()), schema["properties"]
    obeyed = {name: of for name, of in properties.items() if REFUSED not in of}
    first = {name: of for name, of in obeyed.items() if name in needed or name in COMMON}
    if len(obeyed) <= FEW:
        first = obeyed
    others = {name: of for name, of in obeyed.items() if name not in first}
    refused = {name: of for name, of in properties.items() if REFUSED in of}
    return (_table(first, needed) + _folded(others, needed, "more")
            + _folded(refused, needed, "more are refused with any value that would change something"))


def _folded(properties: Json, needed: Collection[str], what: str) -> str:
    if not properties:
        return ""
    return f"<details><summary>{len(properties)} {what}</summary>{_table(properties, needed)}</details>"


def _table(properties: Mapping[str, Json], needed: Collection[str]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' (required)' * (name in needed)}</td><td>{_meaning(of)}</td>"
        f"<td>{escape(json.dumps(of['default'])) if 'default' in of else ''}</td></tr>"
        for name, of in properties.items())
    return ('<div class="wide" tabindex="0" role="region" aria-label="Fields"><table><tr><th>field</th><th>values</th>'
            f"<th>default</th></tr>{rows}</table></div>")


def _meaning(schema: Json) -> str:
    kinds = escape(" or ".join(dict.fromkeys(_values(schema))))
    return f"{kinds}<br><small>{escape(schema['description'])}</small>" if "description" in schema else kinds


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
