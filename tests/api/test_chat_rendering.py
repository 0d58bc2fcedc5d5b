"""Answers as the chat page draws them while they arrive, in a real browser: whatever a model writes, piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import browser
from support.live_server import ENDLESS, ENDLESS_CONTEXT, Server, eventually, running, unanswered

DRAWN = """async ([text, piece]) => {
  const box = document.createElement("div");
  document.getElementById("turns").append(box);
  document.body.classList.remove("fresh");
  let done = 0; // characters that are parsed, sanitized or drawn
  const counted = (owner, name) => {
    const own = owner[name];
    owner[name] = function (...given) { done += given[0].length; return own.apply(this, given); };
    return () => { owner[name] = own; };
  };
  const restored = [counted(marked.Lexer.prototype, "blockTokens"), counted(marked.Lexer.prototype, "inlineTokens"),
    counted(DOMPurify, "sanitize")];
  const tally = (records) => {
    for (const { type, target, oldValue, addedNodes } of records) {
      if (type === "characterData") done += target.length - oldValue.length;
      else for (const node of addedNodes) done += node.textContent.length;
    }
  };
  const changes = new MutationObserver(tally);
  changes.observe(box, { childList: true, subtree: true, characterData: true, characterDataOldValue: true });
  const work = () => {
    tally(changes.takeRecords());
    const found = done;
    done = 0;
    return found;
  };
  const rendering = new slotwise.Rendering(box);
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  let most = 0; // work of a drawing
  for (let at = 0; at < text.length; at += piece) {
    rendering.cost = 0; // or the next drawing waits, and draws several pieces
    rendering.add(text.slice(at, at + piece));
    while (rendering.pending) await frame();
    most = Math.max(most, work());
  }
  rendering.finish();
  const last = work();
  changes.disconnect();
  restored.forEach((restore) => restore());
  const said = { html: box.innerHTML, text: box.textContent, most, last,
    links: [...box.querySelectorAll("a")].map((one) => [one.getAttribute("href"), one.rel, one.target]),
    tags: [...new Set([...box.querySelectorAll("*")].map((one) => one.localName))] };
  box.remove();
  return said;
}"""
ANSWER = """# A heading

Some *emphasis*, **strength**, `code` and a [link](https://example.com/a?b=1) or [another][ref].

- one
- two
  1. nested
  2. again

| a | b |
|---|--:|
| 1 | <br> |

> quoted

```python
def add(a, b):
    return a + b  # ``` is no end
```

~~~
plain
~~~

Setext
======

last

[ref]: https://example.org/
"""
HARMLESS = {"div", "p", "br", "hr", "strong", "em", "del", "code", "pre", "ul", "ol", "li", "blockquote", "a", "h1",
            "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "span",
            "button"}
HOSTILE = ("<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 1'> <svg onload=hacked()>\n\n"
           "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>\n\n<style>* { display: none }</style>\n\n"
           "[a](javascript:window.hacked=1) [b](data:text/html,x) [c](//example.net/x) [d](vbscript:x) "
           "![picture](http://example.net/x.png) <a href='javascript:window.hacked=1'>e</a>\n\n"
           "```<script>alert(1)</script>\n</code></pre><script>window.hacked = 1</script>\n```\n")
LONGEST = 16_384  # characters of a block that the page renders as Markdown (`markdown.js`)
LONG = {"code": "```python\n" + "print('hello')\n" * 8000, "paragraph": "word " * 24_000,
        "paragraphs": "A **bold** paragraph with `code`.\n\n" * 3500, "list": "- an item of the list\n" * 5000,
        "quotes": "> " * 60_000, "lists": "- " * 60_000, "emphasis": "_a" * 60_000, "brackets": "[" * 120_000}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(chromium: Any, server: Server) -> Iterator[Any]:
    opened = chromium.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(f"{message.text} {message.location['url']}"))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: complaints.append(request.url) if not request.url.startswith(
        (server.url, "data:")) else None)
    opened.goto(server.url)
    opened.wait_for_selector("#modes button", state="attached")
    yield opened
    # A slow page asks where its request is in the queue, and may find that it has ended.
    assert [one for one in complaints if not ("404" in one and "/requests/" in one)] == []
    assert opened.evaluate("window.hacked") is None


def drawn(page: Any, text: str, piece: int) -> dict[str, Any]:
    """What the page shows of a text that arrives in pieces of so many characters."""
    found: dict[str, Any] = page.evaluate(DRAWN, [text, piece])
    return found


@pytest.mark.parametrize("piece", [1, 7, 50])
def test_an_answer_in_pieces_looks_like_the_whole_one(page: Any, piece: int) -> None:
    whole, parts = drawn(page, ANSWER, len(ANSWER)), drawn(page, ANSWER, piece)
    assert parts["html"] == whole["html"]
    assert {"h1", "em", "strong", "ul", "ol", "table", "blockquote", "figure", "br"} <= set(whole["tags"])
    assert [link for link, *_ in whole["links"]] == ["https://example.com/a?b=1", "https://example.org/"]
    assert "# ``` is no end" in whole["text"] and whole["html"].count("<figure") == 2


def test_windows_line_ends_are_line_ends(page: Any) -> None:
    assert drawn(page, ANSWER.replace("\n", "\r\n"), 3)["html"] == drawn(page, ANSWER, 3)["html"]


@pytest.mark.parametrize("piece", [3, 1000])
def test_what_is_hostile_is_shown_and_does_nothing(page: Any, piece: int) -> None:
    found = drawn(page, HOSTILE, piece)
    assert set(found["tags"]) <= HARMLESS, found["html"]
    assert "window.hacked = 1" in found["text"] and "onerror" in found["text"]
    kept = [link for link in found["links"] if link[0] is not None]
    assert kept == [["http://example.net/x.png", "noopener noreferrer nofollow", "_blank"]]
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("name", LONG)
def test_a_long_answer_is_drawn_in_work_of_bounded_size(page: Any, name: str) -> None:
    text = LONG[name]
    found = drawn(page, text, 2000)
    assert 2000 <= found["most"] < 10 * (LONGEST + 2000), "what is drawn at a time does not grow with the answer"
    assert found["last"] < 10 * len(text)
    shown = "".join(found["text"].split())
    if name in ("paragraph", "quotes", "lists", "emphasis", "brackets"):
        assert shown == "".join(text.split())
    assert len(shown) > 0.6 * len("".join(text.split()))


def test_text_right_behind_a_long_block_is_drawn(page: Any) -> None:
    block = "```\n" + "print(1)\n" * 1999 + "\n```\n"
    assert len(block) == 90 * 200, "a piece ends with it"
    text = block + "The function **above** prints a number. " * 40
    found = drawn(page, text, 200)
    assert found["text"].count("The function above prints a number.") == 40 and "strong" in found["tags"]
    assert found["html"] == drawn(page, text, len(text))["html"]


def test_an_answer_of_many_events_at_once_is_drawn_and_kept(page: Any) -> None:
    words = [f"word{index} " for index in range(6000)]
    events = [{"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}],
               "usage": {"prompt_tokens": 3, "completion_tokens": index + 1, "total_tokens": index + 4}}
              for index, word in enumerate(words)]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.get_by_test_id("composer").fill("write")
    page.keyboard.press("Enter")
    page.get_by_test_id("copy").wait_for(timeout=60_000)
    page.unroute("**/v1/chat/completions")
    assert "word5999" in page.get_by_test_id("answer").inner_text()
    assert "6,000 tokens" in page.get_by_test_id("facts").inner_text()
    kept = page.evaluate("Object.entries(localStorage).find(([key]) => key.startsWith('slotwise-chat-'))[1]")
    assert "word5999" in kept
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    page.locator("#latest").wait_for()
    page.locator("#latest").click()
    assert page.evaluate("(() => { const { scrollTop, clientHeight, scrollHeight } = document.getElementById('scroll');"
                         " return scrollHeight - scrollTop - clientHeight < 60; })()")


def test_a_question_that_waits_says_how_many_are_ahead(chromium: Any, folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "seconds_per_step=0.05", "max_num_seqs=1", ENDLESS_CONTEXT) as slow, \
            unanswered(slow, "/v1/completions", ENDLESS), unanswered(slow, "/v1/completions", ENDLESS):
        eventually(lambda: slow.get("/health").json()["num_live"] == 2)
        page = chromium.new_page()
        page.goto(slow.url)
        page.get_by_test_id("composer").fill("hello")
        page.keyboard.press("Enter")
        page.get_by_text("Waiting for a slot: 1 ahead").wait_for(timeout=60_000)
        page.get_by_text("1 other request running, 1 waiting").wait_for(timeout=60_000)
        page.keyboard.press("Escape")
        error = page.get_by_test_id("error")
        error.wait_for(timeout=60_000)
        assert error.inner_text() == "Stopped before its first token."
