"""The chat page in a real browser, with a real server and a real model behind it.

What the model says is forced only where a test is about how an answer is shown: a structured output then makes the
model write a hostile text, or reasoning.  With `SLOTWISE_PICTURES=docs/pictures` the views are photographed as well.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from support.accessibility import violations
from support.browser import browser
from support.live import Live, serving
from support.live_server import Server, eventually, running
from support.real_weights import find

from slotwise.measure.bench.server_run import NO_QUEUE_BOUND

pytestmark = pytest.mark.slow

KEY, ADMIN_KEY = "a key of ours", "the key of an operator"
MODEL = "SmolLM2-135M-Instruct"
GREEDY = {"sampling": {"temperature": "0", "max_tokens": "40"}}
MIDDLING = {"sampling": {"temperature": "0", "max_tokens": "400"}}
LONG = {"sampling": {"temperature": "0", "max_tokens": "3000"}}
LOOKS = {"light": (1120, False), "dark": (1120, True), "narrow": (360, False)}
PICTURES = (  # of the views in their looks, those that docs/chat-page.md shows
    "empty_light", "empty_narrow", "streaming_dark", "explained_light", "explained_narrow", "timeline_light",
    "timeline_narrow", "tool_call_dark")
HOSTILE = """Look: <script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">
[a](javascript:window.hacked=1) [b](data:text/html,x) ![c](http://example.invalid/c.png)
<iframe src="/timeline"></iframe>
<a href="#" onclick="window.hacked = 1">d</a> <form action="http://example.invalid"><button>e</button></form>
<style>body { display: none }</style><svg onload="window.hacked = 1"></svg>"""
TOOL = [{"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}}}]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def server(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """SmolLM2; no key is needed, and this machine may administer it."""
    with serving(str(find()), "--max-num-seqs", "8", "--max-model-len", "4096", "--reasoning-parser", "qwen3",
                 *NO_QUEUE_BOUND, log=tmp_path_factory.mktemp("chat") / "stderr") as started:
        yield started


@pytest.fixture(scope="module")
def locked(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A toy model behind keys, below a proxy's prefix."""
    log = tmp_path_factory.mktemp("log") / "engine"
    with running(folder, log, f"api_keys={KEY}", f"admin_api_key={ADMIN_KEY}", "root_path=/llm") as started:
        yield started


class Chat:
    """A reader at the page."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.bodies: list[dict[str, Any]] = []  # of requests for answers
        page.on("request", lambda one: self.bodies.append(one.post_data_json) if "/v1/chat" in one.url else None)

    def part(self, name: str) -> Any:
        return self.page.get_by_test_id(name)

    def ask(self, text: str) -> None:
        self.part("composer").fill(text)
        self.page.keyboard.press("Enter")

    def ended(self, number: int = 1) -> Any:
        """The last of so many answers, once it is complete."""
        expect(self.part("answer")).to_have_count(number, timeout=60_000)
        answer = self.part("answer").last
        expect(answer).to_have_attribute("aria-busy", "false", timeout=60_000)
        return answer

    def answered(self, text: str, number: int = 1) -> Any:
        self.ask(text)
        return self.ended(number)

    def force(self, **fields: Any) -> None:
        """Requests have these fields, too."""
        self.page.route("**/v1/chat/completions", lambda route: route.continue_(
            post_data=json.dumps(route.request.post_data_json | fields)))


@contextmanager
def visit(chromium: Any, url: str, *, look: str = "light", settings: dict[str, Any] | None = None,
          refused: str = "401 ") -> Iterator[Chat]:
    """A reader with a browser of their own.  Nothing may be reported on its console, or requested of another host.

    Args:
        refused: statuses that are expected of some answers, as a regular expression: a browser reports each.  The
            position of a request that has just ended is not found, either.
    """
    width, dark = LOOKS[look]
    context = chromium.new_context(
        viewport={"width": width, "height": 720}, color_scheme="dark" if dark else "light", reduced_motion="reduce",
        permissions=["clipboard-read", "clipboard-write"])
    stored = json.dumps(json.dumps(GREEDY if settings is None else settings))
    context.add_init_script(f"if (location.protocol === 'http:') localStorage['slotwise-chat-settings'] ??= {stored}")
    complaints, origin = list[str](), "/".join(url.split("/", 3)[:3])
    context.on("console", lambda message: complaints.append(
        f"{message.text} {message.location['url']}") if message.type != "debug" else None)
    context.on("weberror", lambda error: complaints.append(str(error.error)))
    context.on("request", lambda request: complaints.append(f"requested {request.url}") if not request.url.startswith(
        ("data:", "blob:", f"{origin}/")) else None)
    try:
        page = context.new_page()
        page.goto(url)
        yield Chat(page)
        expected = re.compile(rf"with a status of (?:(?:{refused})|404 .*/requests/)")
        assert [one for one in complaints if not expected.search(one)] == []
    finally:
        context.close()


def running_requests(server: Live) -> int:
    found = re.search(r"^slotwise:num_requests_running.* (\S+)$", server.client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


# -- a conversation ----------------------------------------------------------------------------------------------------


def test_a_question_is_answered_word_by_word(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url) as chat:
        chat.page.evaluate("""() => {
          window.seen = new Set();
          new MutationObserver(() => seen.add(document.querySelector("[data-testid=answer] .body")?.textContent.length))
            .observe(document.getElementById("turns"), { childList: true, subtree: true, characterData: true });
        }""")
        answer = chat.answered("Why is the sky blue?")
        assert re.search("[a-z]{3}", answer.locator(".body").inner_text())
        assert chat.page.evaluate("seen.size") > 3, "it came at once, and not as it was written"
        facts = answer.get_by_test_id("facts").inner_text()
        assert re.search(r"\d+(\.\d)? tokens/s", facts) and re.search(r"first token \d+", facts), facts
        assert re.search(r"\d+ of \d+ prompt tokens cached", facts), facts
        assert chat.page.title() and chat.part("composer").input_value() == ""
        (body,) = chat.bodies
        assert body["temperature"] == 0 and body["max_tokens"] == 40 and body["stream"] is True
        assert MODEL in chat.page.locator("header").inner_text()


def test_the_conversation_goes_on_and_its_beginning_is_found_in_the_cache(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url) as chat:
        chat.answered("My name is Ada, and I like trains very much indeed. Say hello to me.")
        answer = chat.answered("What is my name?", 2)
        assert [one["role"] for one in chat.bodies[1]["messages"]] == ["user", "assistant", "user"]
        cached = re.search(r"(\d+) of (\d+) prompt tokens cached", answer.get_by_test_id("facts").inner_text())
        assert cached is not None and 16 <= int(cached[1]) < int(cached[2])


def test_an_answer_is_stopped_on_the_page_and_in_the_server(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url, settings=LONG) as chat:
        chat.force(ignore_eos=True)
        for stop in (lambda: chat.page.keyboard.press("Escape"), lambda: chat.part("stop").click()):
            chat.ask("Write a very long story about a train.")
            expect(chat.part("answer").last.locator(".body")).not_to_be_empty()
            expect(chat.part("send")).to_be_hidden()
            stop()
            answer = chat.ended(chat.part("question").count())
            text = answer.locator(".body").inner_text()
            eventually(lambda: running_requests(server) == 0)
            assert answer.locator(".body").inner_text() == text != ""
            assert "stopped" in answer.get_by_test_id("facts").inner_text()
            expect(chat.part("send")).to_be_visible()


def test_an_answer_is_tried_again_and_a_question_is_changed(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url, settings={"sampling": {"max_tokens": "12"}}) as chat:
        chat.answered("What is the capital of France?")
        before = len(chat.bodies)
        chat.part("retry").click()
        chat.ended(1)
        assert len(chat.bodies) == before + 1 and chat.bodies[-1]["messages"] == chat.bodies[-2]["messages"]
        chat.answered("And of Italy?", 2)
        chat.part("edit").first.click()
        field = chat.part("edit-field")
        assert field.input_value() == "What is the capital of France?"
        field.fill("What is the capital of Norway?")
        chat.page.keyboard.press("Enter")
        expect(chat.part("question")).to_have_count(1)
        chat.ended(1)
        assert chat.bodies[-1]["messages"] == [{"role": "user", "content": "What is the capital of Norway?"}]


def test_a_system_prompt_and_sampling_are_sent(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url, settings={}) as chat:
        chat.part("sampling").click()
        chat.part("system-prompt").fill("Answer with one word.")
        for name, value in (("Temperature", "0.5"), ("Top p", "0.9"), ("Most tokens", "5"), ("Seed", "7")):
            chat.page.get_by_label(name, exact=True).fill(value)
        assert violations(chat.page) == []
        chat.answered("Which color has the sky?")
        (body,) = chat.bodies
        assert body["messages"][0] == {"role": "system", "content": "Answer with one word."}
        assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.5, 0.9, 5, 7)


def test_an_answer_and_its_code_are_copied(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url) as chat:
        chat.force(structured_outputs={"choice": ["Here it is:\n\n```python\nprint('a < b')\n```\n\n**Done.**"]})
        answer = chat.answered("Write a line of Python.")
        clipboard = "navigator.clipboard.readText()"
        answer.get_by_test_id("copy").click()
        assert chat.page.evaluate(clipboard) == "Here it is:\n\n```python\nprint('a < b')\n```\n\n**Done.**"
        answer.get_by_test_id("copy-code").click()
        assert chat.page.evaluate(clipboard).strip() == "print('a < b')"
        assert answer.locator("strong").inner_text() == "Done."


def test_conversations_are_kept_in_the_browser_until_they_are_deleted(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url, settings={"sampling": {"max_tokens": "5"}}) as chat:
        chat.answered("First question")
        chat.part("new-chat").click()
        expect(chat.part("answer")).to_have_count(0)
        chat.answered("Second question")
        chat.page.reload()
        history = chat.part("history")
        expect(history).to_contain_text("First question")
        history.get_by_text("First question").click()
        expect(chat.part("question")).to_have_text(re.compile("First question"))
        assert chat.part("answer").locator(".body").inner_text()
        history.get_by_role("button", name="Delete all").click()
        chat.page.get_by_role("button", name="Delete", exact=True).click()
        expect(history).not_to_contain_text("First question")
        kept = chat.page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('slotwise-chat-'))")
        assert kept == ["slotwise-chat-settings"]


# -- what only this server knows ---------------------------------------------------------------------------------------


def test_an_answer_is_explained_and_its_slots_are_shown(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url) as chat:
        answer = chat.answered("What is the capital of France?")
        answer.get_by_test_id("explain").click()
        explanation = answer.get_by_test_id("explanation")
        expect(explanation).to_contain_text(re.compile(r"\d+ ms|\d s"))
        answer.get_by_test_id("slots").click()
        frame = chat.page.frame_locator("iframe")
        expect(frame.locator("#story")).to_contain_text("chatcmpl-")
        chat.part("timeline-toggle").click()
        expect(chat.page.locator("iframe")).to_have_count(0)


def test_streams_of_others_are_counted_and_not_shown(chromium: Any, server: Live) -> None:
    body = {"prompt": "A secret of another client:", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with visit(chromium, server.url) as chat, httpx.stream(
            "POST", server.url + "/v1/completions", json=body, timeout=60) as other:
        stream = other.iter_bytes()  # kept: without it the connection closes
        next(stream)
        expect(chat.page.locator("#busy")).to_contain_text("1 other request running")
        assert "secret" not in chat.page.content()


# -- who may -----------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_once_and_stands_in_no_address(chromium: Any, locked: Server) -> None:
    with visit(chromium, locked.url + "/llm") as chat:
        asked: list[str] = []
        chat.page.on("request", lambda request: asked.append(request.url))
        expect(chat.part("key")).to_be_visible()
        chat.part("key").fill("not a key")
        chat.page.keyboard.press("Enter")
        expect(chat.page.locator("#wrong")).to_be_visible()
        chat.part("key").fill(KEY)
        chat.page.keyboard.press("Enter")
        expect(chat.page.locator("header")).to_contain_text("toy")
        chat.answered("Hello")
        chat.page.reload()
        expect(chat.page.locator("header")).to_contain_text("toy")
        expect(chat.part("key")).to_be_hidden()
        assert asked and all(url.startswith(f"{locked.url}/llm") and "key" not in url for url in asked)
        kept = chat.page.evaluate("JSON.stringify(localStorage)")
        assert KEY not in kept and chat.page.evaluate("sessionStorage['slotwise-key']") == KEY


def test_a_sleeping_model_is_waked_by_who_may(chromium: Any, server: Live) -> None:
    server.client.post("/sleep").raise_for_status()
    with visit(chromium, server.url, refused="503 .*/health") as chat:
        expect(chat.page.locator("#notice")).to_contain_text("it sleeps")
        assert violations(chat.page) == []
        chat.part("wake").click()
        expect(chat.page.locator("#notice")).to_be_hidden(timeout=60_000)
        assert chat.answered("What is the capital of France?").locator(".body").inner_text()


def test_who_has_not_the_admin_key_is_asked_for_it(chromium: Any, locked: Server) -> None:
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    slept = locked.client.post(locked.url + "/sleep?level=2", headers=admin)
    assert slept.status_code == 200, slept.text
    with visit(chromium, locked.url + "/llm", refused="40[13] |503 ") as chat:
        chat.part("key").fill(KEY)
        chat.page.keyboard.press("Enter")
        expect(chat.page.locator("#notice")).to_contain_text("admin key")
        chat.part("wake").click()
        chat.part("key").fill(ADMIN_KEY)
        chat.page.keyboard.press("Enter")
        expect(chat.page.locator("#notice")).to_be_hidden(timeout=60_000)
        assert chat.page.evaluate("sessionStorage['slotwise-key']") == KEY, "an operator's key is not kept"


# -- what a model may write --------------------------------------------------------------------------------------------


def test_a_tool_call_is_folded_and_what_the_tool_returns_is_sent(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url) as chat:
        chat.part("sampling").click()
        chat.page.get_by_text("Tools", exact=True).click()
        chat.part("tools").fill(json.dumps(TOOL))
        chat.page.locator("#toolchoice").select_option("required")
        answer = chat.answered("What is the weather in Oslo?")
        call = answer.get_by_test_id("tool-call").first
        expect(call.locator("summary")).to_contain_text("get_weather(")
        assert call.get_attribute("open") is None
        call.locator("summary").click()
        assert json.loads(call.locator("pre").first.inner_text())["city"] in ("Oslo", "Paris", "Rome")
        chat.page.locator("#toolchoice").select_option("")
        answer.get_by_test_id("tool-result").fill("Snow, -3 degrees")
        answer.get_by_role("button", name="Send results").click()
        chat.ended(2)
        assert [one["role"] for one in chat.bodies[-1]["messages"]] == ["user", "assistant", "tool"]
        assert chat.bodies[-1]["messages"][-1]["content"] == "Snow, -3 degrees"


def test_reasoning_is_folded(chromium: Any, server: Live) -> None:
    """The structure makes SmolLM2 begin to reason; it then writes what it likes."""
    with visit(chromium, server.url) as chat:
        chat.force(structured_outputs={"choice": ["<think>Yes.</think>No"]})
        answer = chat.answered("Is the sky blue?")
        reasoning = answer.get_by_test_id("reasoning")
        inside = reasoning.locator("summary ~ *").first
        expect(inside).to_be_hidden()
        reasoning.locator("summary").click()
        expect(inside).to_be_visible()
        assert re.search("[a-z]{3}", inside.inner_text()) and answer.locator(".body").inner_text() == ""


def test_what_a_hostile_model_writes_does_nothing(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url, settings=MIDDLING) as chat:
        chat.force(structured_outputs={"choice": [HOSTILE]})
        answer = chat.answered("Break out")
        answer.get_by_test_id("explain").click()
        chat.page.reload()
        chat.part("history").get_by_text("Break out").click()
        answer = chat.ended(1)
        body = answer.locator(".body")
        expect(body, "it is shown as it was written").to_contain_text("window.hacked = 1")
        assert body.locator("script, img, iframe, form, style, svg, [onclick], [onerror], [onload]").count() == 0
        links = body.locator("a[href]").evaluate_all("all => all.map((one) => [one.protocol, one.rel, one.target])")
        assert {one[0] for one in links} <= {"http:", "https:", "mailto:"}
        assert all("noopener" in rel and target == "_blank" for _, rel, target in links)
        assert chat.page.evaluate("window.hacked") is None and chat.page.locator("main").is_visible()


# -- for everyone ------------------------------------------------------------------------------------------------------


def picture(chat: Chat, name: str) -> None:
    """Photographs one of `PICTURES`, where `SLOTWISE_PICTURES` names a folder."""
    if (folder := os.environ.get("SLOTWISE_PICTURES")) and name in PICTURES:
        chat.page.mouse.move(0, 0)
        chat.page.screenshot(path=Path(folder) / f"chat_{name}.png")


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize("look", LOOKS)
def test_every_view_can_be_used_by_everyone(chromium: Any, server: Live, look: str) -> None:
    with visit(chromium, server.url, look=look, settings=MIDDLING) as chat:
        expect(chat.page.locator("header")).to_contain_text(MODEL)

        def check(view: str) -> None:
            picture(chat, f"{view}_{look}")
            assert violations(chat.page) == [], view
            assert fits(chat.page), view

        check("empty")
        chat.ask("List three reasons to learn Python, each with a short example.")
        eventually(lambda: len(chat.part("answer").locator(".body").inner_text()) > 200)
        expect(chat.page.locator("#busy")).to_contain_text("only yours")
        check("streaming")
        chat.page.keyboard.press("Escape")
        chat.ended(1)
        if look == "narrow":
            chat.page.locator("#menu").click()
        chat.part("new-chat").click()
        if "SLOTWISE_PICTURES" not in os.environ:
            chat.force(max_tokens=60)
        answer = chat.answered("Write a Python function that reverses a string, and explain it.")
        answer.get_by_test_id("explain").click()
        expect(answer.get_by_test_id("explanation").locator("p")).to_be_visible()
        check("explained")
        answer.get_by_test_id("slots").click()
        expect(chat.page.frame_locator("iframe").locator("#story")).to_contain_text("chatcmpl-")
        check("timeline")
        chat.part("timeline-toggle").click()
        chat.force(tools=TOOL, tool_choice="required", parallel_tool_calls=False)
        if look == "narrow":
            chat.page.locator("#menu").click()
        chat.part("new-chat").click()
        chat.answered("What is the weather in Oslo?").get_by_test_id("tool-call").locator("summary").click()
        check("tool_call")


def test_the_theme_is_chosen_and_kept(chromium: Any, server: Live) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with visit(chromium, server.url) as chat:
        light = chat.page.evaluate(ground)
        chat.part("theme").click()
        dark = chat.page.evaluate(ground)
        chat.page.reload()
        assert light != dark == chat.page.evaluate(ground)


def test_the_keyboard_reaches_everything(chromium: Any, server: Live) -> None:
    with visit(chromium, server.url, settings={"sampling": {"max_tokens": "5"}}) as chat:
        chat.answered("Hello")
        reached = set()
        for _ in range(40):
            chat.page.keyboard.press("Tab")
            reached.add(chat.page.evaluate("document.activeElement.dataset.testid ?? ''"))
            outline = chat.page.evaluate("""(() => {
              const { activeElement: focused } = document;
              return getComputedStyle(focused.id === "composer" ? focused.parentElement : focused).outlineStyle;
            })()""")
            focused = chat.page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
            assert outline != "none" or focused.startswith(("<body", "<iframe")), focused
        assert reached >= {
            "composer", "sampling", "timeline-toggle", "theme", "new-chat", "edit", "copy", "retry", "explain"}


def test_the_timeline_of_the_same_server_can_be_used_by_everyone(chromium: Any, server: Live) -> None:
    for look in LOOKS:
        with visit(chromium, server.url + "/timeline", look=look) as chat:
            expect(chat.page.locator("#state")).to_have_text("live")
            assert violations(chat.page) == [], look
