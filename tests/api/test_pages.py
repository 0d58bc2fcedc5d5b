"""The pages `/links` and `/docs`, and a prefix that a reverse proxy adds."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import msgspec
import pytest
from support.live_server import Server, running

from slotwise.api.admin.openapi import AREAS, COMMON, EXAMPLES, area_of
from slotwise.api.admin.openapi import PAGES as OTHERS
from slotwise.api.app import BODIES, ROUTES
from slotwise.api.asgi import below
from slotwise.api.generate.request_log import GENERATING
from slotwise.api.protocol.unsupported import unsupported_fields

PAGES = ("/links", "/docs")
LOADS = ("src", "srcset", "data", "poster", "background", "action")  # attributes that name what a browser fetches


class Read(HTMLParser):
    """What a page has: its links, what it loads, its style, its script, its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links, self.loads, self.tags, self.text, self.style = list[str](), list[str](), set[str](), "", ""
        self.script = ""
        self._within = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._within = tag
        found = dict(attrs)
        self.loads += [found[name] or "" for name in LOADS if name in found]
        if "href" in found and not (found["href"] or "").startswith("#"):
            (self.links if tag == "a" else self.loads).append(found["href"] or "")

    def handle_data(self, data: str) -> None:
        if self._within in ("style", "script"):
            setattr(self, self._within, getattr(self, self._within) + data)
        else:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._within = ""


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without the chat page, whose tests are in test_chat_page.py."""
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "ui=0") as started:
        yield started


@pytest.fixture(scope="module")
def below_a_prefix(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "root_path=/some/llm", "ui=0",
                 "allowed_hosts=*") as started:
        yield started


@pytest.mark.parametrize("path", PAGES)
def test_a_page_loads_nothing_and_runs_its_own_script_at_most(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Read(answer.text)
    assert set(page.loads) == {"data:,"} and not page.tags & {"iframe", "object", "embed", "base"}
    policy = dict(one.split(maxsplit=1) for one in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["style-src"] == f"'sha256-{digest(page.style)}'"
    assert policy.get("script-src") == (f"'sha256-{digest(page.script)}'" if page.script else None)
    assert bool(page.script) == (path == "/docs")
    assert answer.headers["x-content-type-options"] == "nosniff"


def digest(part: str) -> str:
    return base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()


@pytest.mark.parametrize("path", PAGES)
def test_links_of_a_page_lead_somewhere(server: Server, path: str) -> None:
    links = Read(server.get(path).text).links
    assert links and {server.get(link).status_code for link in links} == {200}


def test_the_page_of_links_leads_to_the_others(server: Server) -> None:
    page = Read(server.get("/links").text)
    assert {"/docs", "/timeline", "/health"} <= set(page.links) and "toy" in page.text


def test_the_example_can_be_sent_as_it_stands(server: Server) -> None:
    page = html.unescape(server.get("/links").text)
    command = page[page.index("curl -N "):page.index("</pre>")]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert f"{server.url}/v1/chat/completions" in command and '"model": "toy"' in command
    assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]"), done


@pytest.mark.parametrize(("host", "shown"), [
    ("localhost:8000", "localhost:8000"), ("[::1]:8", "[::1]:8"), ("example.com", "example.com"), ("$(id)", ""),
    ("a'b", ""), ("x;id", "")])
def test_the_example_has_the_address_that_its_reader_uses(below_a_prefix: Server, host: str, shown: str) -> None:
    shown = shown or below_a_prefix.url.removeprefix("http://")
    page = below_a_prefix.get("/links", Host=host).text
    assert f"curl -N http://{shown}/some/llm/v1/" in page and f"base_url=&quot;http://{shown}/some/llm/v1" in page
    proxied = below_a_prefix.get("/links", Host=host, **{"X-Forwarded-Proto": "https"}).text
    assert f"curl -N https://{shown}/some/llm/v1/" in proxied


def test_the_routes_and_their_fields_are_described(server: Server) -> None:
    text = Read(server.get("/docs").text).text
    for method, path, _ in ROUTES:
        assert f"{method} {path.replace(':path}', '}')}" in text
    document = json.loads(server.get("/openapi.json").content)
    for schema in ("CompletionRequest", "ChatRequest"):
        for field in document["components"]["schemas"][schema]["properties"]:
            assert field in text
    assert "integer from 1 to 128" in text and "a list of " in text


def test_where_keys_are_needed_a_page_tells_no_name(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "ui=0", "api_keys=secret", "more_model_names=<b>second") as server:
        for path in PAGES:
            answer = server.get(path)
            assert answer.status_code == 200 and "second" not in answer.text and "toy" not in Read(answer.text).text
        assert server.get("/openapi.json").status_code == 401


def test_names_are_escaped(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "ui=0", "more_model_names=<script>alert(1)</script>") as server:
        page = Read(server.get("/").text)
        assert "script" not in page.tags and "<script>alert(1)</script>" in page.text


def test_a_request_may_come_with_the_prefix_or_without(below_a_prefix: Server) -> None:
    body = {"prompt": [2], "max_tokens": 1}
    for prefix in ("", "/some/llm"):
        assert below_a_prefix.post(f"{prefix}/v1/completions", body).status_code == 200
        assert below_a_prefix.get(f"{prefix}/v1/models/toy").json()["id"] == "toy"
        assert below_a_prefix.get(f"{prefix}/timeline").status_code == 200
        assert below_a_prefix.get(f"{prefix}/").text == below_a_prefix.get("/some/llm").text
    for other in ("/some/llmX/health", "/some/llm/some/llm/health", "/some", "/llm/health"):
        assert below_a_prefix.get(other).status_code == 404


def test_links_have_the_prefix(below_a_prefix: Server) -> None:
    for path in PAGES:
        links = Read(below_a_prefix.get(path).text).links
        assert links and all(link.startswith("/some/llm/") for link in links)
        assert {below_a_prefix.get(link).status_code for link in links} == {200}
    assert f"{below_a_prefix.url}/some/llm/v1" in below_a_prefix.get("/links").text
    assert below_a_prefix.get("/openapi.json").json()["servers"] == [{"url": "/some/llm"}]


def test_the_prefix_opens_nothing(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "root_path=/llm", "api_keys=secret", "admin_api_key=root") as server:
        for prefix in ("", "/llm"):
            assert server.get(f"{prefix}/health").status_code == 200
            assert server.get(f"{prefix}/metrics").status_code == 401
            statuses = [server.get(f"{prefix}/admin/scheduling", Authorization=f"Bearer {key}").status_code
                        for key in ("no", "secret", "root")]
            assert statuses == [401, 403, 200]


@pytest.mark.parametrize(("root_path", "path", "expected"), [
    ("", "/llm/x", "/llm/x"), ("/llm", "/llm", "/"), ("/llm", "/llm/", "/"), ("/llm", "/llm/x", "/x"),
    ("/llm", "/llmx", "/llmx"), ("/llm", "/x", "/x"), ("/a/b", "/a/b/c", "/c"), ("/llm", "/llm/llm/x", "/llm/x")])
def test_a_path_below_the_prefix(root_path: str, path: str, expected: str) -> None:
    assert below(root_path, path) == expected


def test_only_get_reads_a_page(server: Server) -> None:
    for path in PAGES:
        assert httpx.post(server.url + path, json={}, timeout=120).status_code == 405


def test_the_page_of_links_names_the_routes_that_use_the_model(server: Server) -> None:
    page = server.get("/links").text
    shorter = ("/rerank", "/score", "/classify")  # other names of routes
    assert all(f"<code>{path}</code>" in page for path in GENERATING if path not in shorter)


@pytest.mark.parametrize(("path", "first"), [
    ("/v1/completions", ["prompt", "model"]), ("/v1/chat/completions", ["messages", "model"]),
    ("/v1/responses", ["input", "model"]), ("/v1/messages", ["messages", "max_tokens", "model"])])
def test_fields_begin_with_those_that_are_needed_and_refused_ones_are_folded(
        server: Server, path: str, first: list[str]) -> None:
    section = next(one for one in server.get("/docs").text.split("<section ") if f"POST {path}</code>" in one)
    obeyed, refused = section.split("are refused with any value that would change something")
    names = [re.findall(r"<td><code>(\w+)</code>", part) for part in (obeyed, refused)]
    assert names[0][:len(first)] == first and not set(names[0]) & set(names[1])
    assert set(names[1]) == set(unsupported_fields(BODIES[path]))
    common = [name for name in names[0] if name in COMMON]
    assert common == names[0][:len(common)], "the others come later"


def test_every_route_can_be_jumped_to_from_its_area(server: Server) -> None:
    page = server.get("/docs").text
    jumps, routes = re.findall(r'href="#([^"]+)"', page), re.findall(r'<section id="([^"]+)"', page)
    assert jumps == routes and len(set(routes)) == len(ROUTES)
    areas = {path: area_of(path) for _, path, _ in ROUTES}
    assert {path for path, area in areas.items() if area == OTHERS} == {
        "/", "/docs", "/links", "/openapi.json", "/timeline"}
    assert set(areas.values()) == {*AREAS, OTHERS}


def test_examples_are_bodies_of_their_routes(server: Server) -> None:
    kinds = {(method, path) for method, path, _ in ROUTES if path in BODIES and method == "POST"}
    assert kinds <= EXAMPLES.keys()
    for (method, path), body in EXAMPLES.items():
        if path in BODIES:
            msgspec.convert(body, BODIES[path])
        if path in ("/classify", "/v1/classify"):
            continue  # needs a head of labels
        if path in (*GENERATING, "/tokenize", "/detokenize", "/v1/messages/count_tokens"):
            assert server.client.request(method, server.url + path, json=body).status_code == 200, path
