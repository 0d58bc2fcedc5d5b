"""The page of links: what this service has, and a request that can be sent as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from slotwise.api.admin.html import shell
from slotwise.api.admin.openapi import EXAMPLES
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.version import __version__

Link = tuple[str, str]  # a path, and what is there
CHATS, COMPLETES, EMBEDS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USES = (  # what a model may be capable of, and the route of it: the first one is shown
    ("chat", CHATS), ("completion", COMPLETES), ("embedding", EMBEDS), ("score", "/v1/rerank"),
    ("classification", "/v1/classify"))
CHAT_PAGE: Link = ("/", "a page to talk to the model")
LINKS: tuple[Link, ...] = (
    ("/docs", "every route and field, with a form to try each"), ("/timeline", "the batch, step by step, live"),
    ("/health", "whether requests are accepted"), ("/v1/models", "the model"), ("/metrics", "for Prometheus"),
    ("/openapi.json", "the routes, for machines"))
APIS = {"OpenAI's": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
        "Anthropic's": ("/v1/messages",), "Cohere's": ("/v2/rerank", "/v2/embed"), "Jina's": ("/v1/rerank",),
        "vLLM's": ("/v1/score", "/v1/classify", "/v1/systemone")}
# Characters of a host that mean nothing to a shell: a name may contain others, and the example is meant to be pasted.
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
PYTHON = {
    CHATS: ("client.chat.completions.create(\n    model={model},\n    messages={messages})",
            "choices[0].message.content"),
    COMPLETES: ("client.completions.create(\n    model={model},\n    prompt={prompt}, max_tokens=32)",
                "choices[0].text"),
    EMBEDS: ("client.embeddings.create(model={model}, input={input})", "data[0].embedding"),
}


class Example(NamedTuple):
    """A request to show.  Args: route: one of USES; model: "" where a page tells no name."""

    url: str  # of the server, as its reader reaches it, with the prefix of a proxy
    route: str
    model: str
    needs_key: bool


def address_of(exchange: HttpExchange, root_path: str) -> str:
    """Returns the server's address as this reader reaches it, with the prefix."""
    headers = dict(exchange.scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    if not _HOST.fullmatch(host):
        name, port = exchange.scope["server"][:2]
        host = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    forwarded = headers.get(b"x-forwarded-proto", b"").decode("latin-1")
    scheme = forwarded if forwarded in ("http", "https") else exchange.scope["scheme"]
    return f"{scheme}://{host}{root_path}"


def page(told: str, links: Sequence[Link], root_path: str, example: Example) -> bytes:
    """Returns the page.  Args: told: about the service, as HTML."""
    linked = "".join(f'<li><a href="{root_path}{path}"><code>{path}</code></a> <span>{what}</span></li>'
                     for path, what in links)
    *most, last = (f"{owner} API ({', '.join(f'<code>{path}</code>' for path in paths)})"
                   for owner, paths in APIS.items())
    return shell.page("Slotwise", (
        f'<header><h1>Slotwise <small>{__version__}</small></h1></header><main class="links">'
        f'<div class="told">{told}</div><ul class="doors">{linked}</ul><h2>Send a request</h2>'
        f'<pre tabindex="0" role="region" aria-label="With curl">{escape(_curl(example))}</pre>'
        f'<pre tabindex="0" role="region" aria-label="In Python">{escape(_python(example))}</pre>'
        f"<p>It speaks {', '.join(most)} and {last}.</p></main>"))


def _body(example: Example) -> dict[str, Any]:
    named = {"model": example.model} if example.model else {}
    return named | EXAMPLES["POST", example.route]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _curl(example: Example) -> str:
    key = " \\\n  -H \"Authorization: Bearer $SLOTWISE_API_KEY\"" if example.needs_key else ""
    given = _body(example)
    first = ("model", "messages", "prompt", "input", "query")
    lines = [_json({name: given.pop(name)})[1:-1] for name in first if name in given]
    body = shlex.quote("{" + ",\n       ".join([*lines, *([_json(given)[1:-1]] if given else [])]) + "}")
    return f"curl -N {example.url}{example.route} -H 'Content-Type: application/json'{key} \\\n  -d {body}"


def _python(example: Example) -> str:
    if example.route not in PYTHON:
        return _plain_python(example)
    call, answer = PYTHON[example.route]
    model = _json(example.model) if example.model else "client.models.list().data[0].id"
    values = {name: _json(value) for name, value in _body(example).items()} | {"model": model}
    key = 'os.environ["SLOTWISE_API_KEY"]' if example.needs_key else '"none"'
    return (("import os\n\n" if example.needs_key else "") + "from openai import OpenAI\n\n"
            f'client = OpenAI(base_url="{example.url}/v1", api_key={key})\n'
            f"answer = {call.format(**values)}\nprint(answer.{answer})")


def _plain_python(example: Example) -> str:
    """For a route that OpenAI's client does not have."""
    body = ", ".join(f"{name}={_json(value)}" for name, value in _body(example).items())
    key = ',\n    headers={"Authorization": "Bearer " + os.environ["SLOTWISE_API_KEY"]}' if example.needs_key else ""
    return (("import os\n\n" if example.needs_key else "") + "import httpx\n\n"
            f'answer = httpx.post(\n    "{example.url}{example.route}", json=dict({body}){key})\nprint(answer.json())')
