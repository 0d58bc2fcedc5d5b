"""The pages `/docs` and `/links` in a real browser: a request from the form, and what keeps people from using them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.accessibility import violations
from support.browser import browser
from support.live_server import ENDLESS, ENDLESS_CONTEXT, Server, eventually, running

pytestmark = pytest.mark.slow

KEY = "a key of ours"
CHAT, LOAD, EXPLAIN = "POST/v1/chat/completions", "GET/load", "GET/explain/request_id"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def keyed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "engine"
    with running(folder, log, f"api_keys={KEY}", "root_path=/llm", "seconds_per_step=0.01", ENDLESS_CONTEXT) as started:
        yield started


@contextmanager
def opened(chromium: Any, url: str, *, width: int = 1280, dark: bool = False) -> Iterator[Any]:
    """A page in a context of its own; its console must stay silent, and it may not request anything of other hosts."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce",
                                   color_scheme="dark" if dark else "light")
    page, complaints, origin = context.new_page(), list[str](), url.split("/", 3)[2]
    page.on("console", lambda message: complaints.append(message.text) if message.type != "debug" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(f"requested {request.url}") if not request.url.startswith(
        ("data:", f"http://{origin}/")) else None)
    try:
        page.goto(url)
        yield page
        assert [one for one in complaints if "status of 40" not in one] == []
    finally:
        context.close()


def form(page: Any, anchor: str) -> Any:
    """The form of a route, unfolded."""
    folded = page.locator(f'[id="{anchor}"] details.try')
    if folded.get_attribute("open") is None:
        folded.locator("summary").first.click()
    return folded


def test_a_request_from_the_form_streams_its_answer(chromium: Any, server: Server) -> None:
    with opened(chromium, server.url + "/docs") as page:
        page.click(f'nav.jump a[href="#{CHAT}"]')
        tried = form(page, CHAT)
        body = json.loads(tried.locator("textarea").input_value())
        tried.locator("textarea").fill(json.dumps(body | {"max_tokens": 5, "request_id": "from-the-form"}))
        tried.get_by_role("button", name="Send").click()
        expect(tried.get_by_role("status")).to_contain_text("200 OK after")
        answer = tried.get_by_label("The answer").inner_text()
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        assert answer.rstrip().endswith("data: [DONE]")  # how many events there are depends on how quickly it reads
        assert [one["choices"][0]["finish_reason"] for one in events if one["choices"]][-1] == "length" and events[1:]
        said = "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
        assert tried.locator(".text").inner_text().split() == said.split() != []
        assert "text/event-stream" in tried.locator("dl").inner_text() and "x-request-id" in tried.inner_text()
        explained = form(page, EXPLAIN)
        explained.get_by_label("request_id").fill("from-the-form")
        explained.get_by_role("button", name="Send").click()
        expect(explained.get_by_role("status")).to_contain_text("200 OK after")
        assert json.loads(explained.get_by_label("The answer").inner_text())["object"] == "explanation"


def test_what_is_wrong_with_a_body_is_shown_as_the_server_says_it(chromium: Any, server: Server) -> None:
    with opened(chromium, server.url + "/docs") as page:
        tried = form(page, CHAT)
        tried.locator("textarea").fill('{"messages": [], "temperature": -1')
        tried.get_by_role("button", name="Send").click()
        expect(tried.get_by_role("status")).to_contain_text("400 Bad Request after")
        assert "error" in json.loads(tried.get_by_label("The answer").inner_text())


def test_a_key_that_is_typed_once_opens_every_form_and_no_address_has_it(chromium: Any, keyed: Server) -> None:
    with opened(chromium, keyed.url + "/llm/docs") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        tried = form(page, LOAD)
        tried.get_by_role("button", name="Send").click()
        expect(tried.get_by_role("status")).to_contain_text("401 Unauthorized after")
        page.get_by_label("API key").fill(KEY)
        tried.get_by_role("button", name="Send").click()
        expect(tried.get_by_role("status")).to_contain_text("200 OK after")
        tried.locator("summary", has_text="With curl").click()
        shown = tried.get_by_label("The same request with curl").inner_text()
        assert f"{keyed.url}/llm/load" in shown and "$SLOTWISE_API_KEY" in shown and KEY not in shown
        page.reload()
        assert page.get_by_label("API key").input_value() == KEY
        assert asked and all(one.startswith(f"{keyed.url}/llm/") and "key" not in one for one in asked)


def test_a_long_answer_is_stopped_and_the_server_computes_no_further(chromium: Any, keyed: Server) -> None:
    with opened(chromium, keyed.url + "/docs") as page:
        page.get_by_label("API key").fill(KEY)
        tried = form(page, CHAT)
        body = json.loads(tried.locator("textarea").input_value())
        tried.locator("textarea").fill(json.dumps(body | {"max_tokens": ENDLESS["max_tokens"], "ignore_eos": True}))
        tried.get_by_role("button", name="Send").click()
        expect(tried.locator(".text")).not_to_be_empty()
        tried.get_by_role("button", name="Stop").click()
        expect(tried.get_by_role("status")).to_contain_text("stopped after")
        eventually(lambda: keyed.get("/load", Authorization=f"Bearer {KEY}").json()["server_load"] == 0)


@pytest.mark.parametrize("path", ["/links", "/docs"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False)])
def test_pages_can_be_used_by_everyone(chromium: Any, server: Server, path: str, width: int, dark: bool) -> None:
    with opened(chromium, server.url + path, width=width, dark=dark) as page:
        if path == "/docs":
            form(page, CHAT)
            page.locator(f'[id="{CHAT}"] details > summary', has_text="Fields of the body").click()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")
        assert light != dark
