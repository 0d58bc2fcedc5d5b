"""The chat page as it is sent: one document that loads nothing, under a policy that lets only its own scripts run."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from pathlib import Path

import pytest
from support.live_server import Server, running

from slotwise.api import chat_page
from slotwise.api.chat_page import page_builder

VENDORED = resources.files(chat_page).joinpath("vendored")


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def policy_of(server: Server, path: str = "/") -> dict[str, list[str]]:
    found = server.get(path).headers["content-security-policy"]
    return {words[0]: words[1:] for words in (part.split() for part in found.split(";"))}


def test_only_the_scripts_and_the_style_of_the_page_itself_are_allowed(server: Server) -> None:
    page, policy = server.get("/").text, policy_of(server)
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(scripts) == 3 and policy["script-src"] == [digest(script) for script in scripts]
    assert policy["style-src"] == [digest(style)]
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert policy[name] == ["'none'"]
    assert policy["connect-src"] == policy["frame-src"] == ["'self'"] and policy["img-src"] == ["data:"]
    assert policy["require-trusted-types-for"] == ["'script'"] and policy["trusted-types"] == ["dompurify"]


def test_the_page_names_no_other_host(server: Server) -> None:
    page = server.get("/").text
    head = page[:page.index("<script>")]
    assert set(re.findall(r'(?:src|href|action)="([^"]*)"', head)) == {"data:,"} and "//" not in re.sub(
        r"/\*.*?\*/", "", head, flags=re.DOTALL)
    own = page_builder._script()
    assert "http://" not in own and "https://" not in own and "innerHTML" not in own and "eval(" not in own


def test_a_browser_that_has_the_page_is_not_sent_it_again(server: Server) -> None:
    first = server.get("/")
    again = server.get("/", **{"If-None-Match": first.headers["etag"]})
    assert first.status_code == 200 and len(first.content) > 100_000
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == first.headers["etag"]
    assert server.get("/", **{"If-None-Match": '"other"'}).status_code == 200
    assert first.headers["cache-control"] == "no-cache" and first.headers["referrer-policy"] == "no-referrer"


def test_the_libraries_are_those_of_the_notice() -> None:
    notice = VENDORED.joinpath("NOTICE.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` .*\| `([0-9a-f]{64})` \|$", notice, re.MULTILINE))
    assert tuple(sorted(rows)) == tuple(sorted(page_builder.LIBRARIES))
    for name, expected in rows.items():
        content = VENDORED.joinpath(name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == expected
        version = re.search(r"v?(\d+\.\d+\.\d+)", content[:200].decode())
        assert version is not None and f"{version[1]}, `" in notice
    for license_name in re.findall(r"`(LICENSE\.\w+)`", notice):
        assert len(VENDORED.joinpath(license_name).read_text()) > 1000


def test_keys_are_not_needed_for_the_page_and_it_has_no_secret(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "api_keys=hidden-key", "more_model_names=hidden-name") as server:
        page = server.get("/")
        assert page.status_code == 200 and "hidden-key" not in page.text and "hidden-name" not in page.text
        assert server.get("/v1/models").status_code == 401 and server.get("/load").status_code == 401


def test_a_page_of_another_site_gets_neither_the_page_nor_a_frame(server: Server) -> None:
    assert server.get("/", Origin="http://evil.example").status_code == 403
    assert server.get("/", Host="evil.example").status_code == 403
    framed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    assert server.get("/", **framed).status_code == server.get("/timeline", **framed).status_code == 403
    assert policy_of(server, "/timeline")["frame-ancestors"] == ["'self'"]


def test_the_page_knows_the_prefix_of_a_proxy(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "root_path=/some/llm") as server:
        for path in ("/", "/some/llm", "/some/llm/"):
            assert 'data-root="/some/llm"' in server.get(path).text


def test_without_the_page_there_are_links(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "ui=0") as server:
        page = server.get("/")
        assert page.status_code == 200 and "<script" not in page.text and 'href="/timeline"' in page.text


def test_a_model_says_what_it_can_do(server: Server, folder: Path, tmp_path: Path) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["capabilities"] == ["completion", "chat", "embedding", "score", "decision"]
    with running(folder, tmp_path / "engine", "tool_call_parser=hermes", "reasoning_parser=deepseek_r1") as able:
        assert able.get("/v1/models/toy").json()["capabilities"] == [
            "completion", "chat", "embedding", "score", "decision", "tools", "reasoning"]


@pytest.mark.parametrize("name", page_builder.MODULES)
def test_a_module_imports_only_from_those_before_it(name: str) -> None:
    before = {"service", *page_builder.MODULES[:page_builder.MODULES.index(name)]}
    source = resources.files(chat_page).joinpath("assets", f"{name}.js").read_text()
    assert set(re.findall(r'^import .* from "\./(\w+)\.js";$', source, re.MULTILINE)) <= before
