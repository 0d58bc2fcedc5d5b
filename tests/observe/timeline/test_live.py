"""The timeline of a live server, in a real browser: its key, its buttons, and that it draws what the server does."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import httpx
import pytest
from support.browser import browser
from support.live import serving
from support.timeline_logs import cells
from support.timeline_pages import compare, frame, looked_at, written

from slotwise.core import reasons
from slotwise.core.record import StepRecord
from slotwise.measure.bench.server_run import NO_QUEUE_BOUND
from slotwise.observe import log_file

pytestmark = pytest.mark.slow

KEY = "a key of ours"
SLOTS = 12
UNAUTHORIZED = "401 (Unauthorized)"  # what the browser itself says of such an answer


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory, chromium):
    folder = tmp_path_factory.mktemp("timeline")
    # By default a queue is as long as what the machine computes in some seconds: on a busy one too short for a demo.
    with serving("--max-num-seqs", "16", "--api-key", KEY, "--admin-api-key", KEY, "--root-path", "/llm",
                 *NO_QUEUE_BOUND, log=folder / "stderr") as running:
        yield running


@pytest.fixture
def opened(chromium, server):
    """The page behind its key."""
    with looked_at(chromium, server.url + "/timeline") as (page, complaints):
        let_in(page)
        yield page
        assert [one for one in complaints if UNAUTHORIZED not in one] == []


def let_in(page):
    page.wait_for_selector("#door[open]")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    until(page, "slotwise.history.run !== null")
    frame(page)


def until(page, holds):
    """The page's policy lets nobody evaluate strings within it, so they are asked for from here."""
    for _ in range(1200):
        if page.evaluate(holds):
            return
        time.sleep(0.05)
    raise AssertionError(f"never: {holds}")


def changing(page, act):
    """Does what changes the scheduling; agrees where the page asks, as it does for a minute after the test before.

    Returns when the server has answered: a dialog is over some time after it has closed.
    """
    with page.expect_response(lambda response: response.request.method == "PUT", timeout=60_000):
        act()
        if page.is_visible("#sure"):
            page.click("#sure button[value=change]")


def get(server, path):
    return httpx.get(server.url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)


def log_of(server):
    return list(log_file.read(line + b"\n" for line in get(server, "/events?follow=0").content.splitlines()))


def test_a_key_is_asked_for_and_a_wrong_one_again(chromium, server):
    with looked_at(chromium, server.url + "/timeline") as (page, complaints):
        page.wait_for_selector("#door[open]")
        assert not page.is_visible("#wrong")
        page.fill("#key", "not a key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#wrong", state="visible")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        until(page, "slotwise.history.run !== null")
        assert not page.is_visible("#door") and page.inner_text("#state") == "live"
        assert KEY not in page.url and KEY.replace(" ", "%20") not in page.url
        assert complaints and all(UNAUTHORIZED in one for one in complaints), complaints


def test_below_a_prefix_everything_is_fetched_below_it(chromium, server):
    with looked_at(chromium, server.url + "/llm/timeline") as (page, _):
        page.wait_for_selector("#door[open]")
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        until(page, "slotwise.history.run !== null")
        assert asked and all(url.startswith(f"{server.url}/llm/") for url in asked)


def test_a_newcomer_sees_both_ways_to_batch_and_every_cell_is_what_was_planned(server, opened):
    assert opened.is_visible("#empty") and not opened.is_visible("#replica"), "this is no router"
    before = get(server, "/admin/scheduling").json()
    opened.click("#first")
    until(opened, "!document.getElementById('compare').disabled")
    assert get(server, "/admin/scheduling").json() == before
    said = opened.inner_text("#said")
    assert "static" in said and "continuous" in said and "× as fast" in said
    frame(opened)
    assert not opened.is_visible("#empty") and opened.evaluate("slotwise.layout.slots") == SLOTS

    until(opened, "slotwise.history.segments.at(-1).capacity === 16")  # the record comes a little after the answer
    segments = opened.evaluate("slotwise.history.segments.map((one) => [one.kind, one.capacity])")
    assert segments[-3:] == [["static", SLOTS], ["continuous", SLOTS], ["continuous", 16]]
    first, last = opened.evaluate("[slotwise.history.segments.at(-3).first, slotwise.history.end]")
    told = cells(log_of(server))
    assert last == len(told)
    seen = compare(opened, told[first:], first)
    assert {"prefill", "decode", "held", "empty"} <= seen.keys(), seen
    wanted = sum(cell.kind != "held" for step in told[first:] for cell in step.values())
    share = opened.evaluate("([first, last]) => slotwise.history.useful(first, last)", [first, last])
    assert share == pytest.approx(wanted / (SLOTS * (last - first)))


def test_records_that_come_late_are_waited_for(opened):
    """Where both cores are busy, the page reads of a step long after the step's request was answered."""
    opened.evaluate("(() => { const take = slotwise.take.bind(slotwise);"
                    " slotwise.take = (entries) => { setTimeout(() => take(entries), 1500); }; })()")
    changing(opened, lambda: opened.click("#compare"))
    until(opened, "document.getElementById('said').textContent.includes('× as fast')")
    said = opened.inner_text("#said")
    told = [int(steps) for steps in re.findall(r"(?:static|continuous) (\d+) steps", said)]
    until(opened, "slotwise.history.segments.at(-1).capacity === 16")
    segments = opened.evaluate("slotwise.history.segments.slice(-3).map((one) => [one.kind, one.first])")
    assert [kind for kind, _ in segments] == ["static", "continuous", "continuous"], segments
    taken = [after - first for (_, first), (_, after) in pairwise(segments)]
    assert told[0] > told[1], said
    assert told[1] == pytest.approx(taken[1], abs=2), said  # a step that was in flight at the end is nobody's


BUDGETS = (reasons.TIME_BUDGET, reasons.TOKEN_BUDGET, reasons.SHORT_STEP)


def test_a_freed_slot_is_taken_at_the_very_next_step(server):
    """What the picture is there to show, of the run that it has just shown."""
    entries = [entry for entry in log_of(server) if isinstance(entry, StepRecord)]
    kind, refilled, freed = "", {"static": 0, "continuous": 0}, {"static": 0, "continuous": 0}
    for entry, after in pairwise(entries):
        if entry.inputs.configured is not None:
            kind = entry.inputs.configured.batching.kind
        if after.plan.stop is not None and after.plan.stop.reason in BUDGETS:
            continue  # on a busy machine a step's time may leave none for another prompt
        if kind in freed and entry.counters.num_waiting:
            slots = {slot for number, slot in zip(entry.plan.request_ids, entry.plan.slots, strict=True)
                     if number in {end.request_id for end in entry.ended}}
            taken = slots & {slot for number, slot in zip(after.plan.request_ids, after.plan.slots, strict=True)
                             if number in dict(after.admitted)}
            takers = min(len(slots), entry.counters.num_waiting)  # those still on their way may take one, and need not
            freed[kind] += takers
            refilled[kind] += min(len(taken), takers)
    assert freed["continuous"] > 20 and refilled["continuous"] == freed["continuous"]


def test_requests_are_sent_batched_as_chosen_and_followed(server, opened):
    changing(opened, lambda: opened.select_option("#slots", "4"))
    until(opened, "slotwise.history.segments.at(-1).capacity === 4")
    changing(opened, lambda: opened.select_option("#batching", "orca"))
    until(opened, "slotwise.history.segments.at(-1).kind === 'orca'")
    asked = get(server, "/admin/scheduling").json()
    assert asked["batching"] == "orca" and asked["max_num_seqs"] == 4
    opened.click("#pause")
    frame(opened)
    before = opened.evaluate("[slotwise.view.to, slotwise.history.end]")
    opened.click("#send")
    until(opened, "!document.getElementById('send').disabled")
    until(opened, "slotwise.history.last.running === 0 && slotwise.history.last.waiting === 0")
    to, end = opened.evaluate("[slotwise.view.to, slotwise.history.end]")
    assert end > before[1] + 24 and to >= end  # sending follows again what happens
    opened.keyboard.press(" ")
    paused = opened.evaluate("slotwise.view.to")
    opened.click("#send")
    until(opened, "!document.getElementById('send').disabled")
    assert opened.evaluate("slotwise.view.to") != paused
    changing(opened, lambda: opened.select_option("#slots", "16"))
    changing(opened, lambda: opened.select_option("#batching", "continuous"))
    until(opened, "slotwise.history.segments.at(-1).kind === 'continuous'")
    until(opened, "slotwise.history.segments.at(-1).capacity === 16")


COMPLETION = {"prompt": "def add(a, b):", "max_tokens": 4}


def complete(server, **changes):
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.stream("POST", server.url + "/v1/completions", headers=headers, json=COMPLETION | changes, timeout=120)


@pytest.fixture
def puts(opened):
    """The bodies that this page puts to the server."""
    bodies = []
    opened.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "PUT" else None)
    return bodies


def test_others_requests_are_not_rescheduled_unasked(server, opened, puts):
    settings = get(server, "/admin/scheduling").json()
    many = {"prompt": [COMPLETION["prompt"]] * 64, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with complete(server, **many) as response:
        answer = response.iter_bytes()  # kept: without it the connection closes
        next(answer)
        until(opened, "slotwise.history.last?.waiting > 0")
        opened.keyboard.press("c")
        assert opened.is_visible("#sure")
        assert re.fullmatch(r"In progress: \d+ requests of others\.", opened.inner_text("#others"))
        assert "“Static, then continuous” changes the batching and the slots" in opened.inner_text("#change")
        assert opened.evaluate("document.activeElement.textContent") == "Leave it as it is"
        opened.keyboard.press("Enter")
        opened.wait_for_selector("#sure", state="hidden")
        opened.click("#compare")
        assert opened.is_visible("#sure")
        opened.keyboard.press("Escape")
        opened.wait_for_selector("#sure", state="hidden")
        assert not opened.is_disabled("#compare")
        opened.select_option("#batching", "static")
        assert "would be batched by “static”" in opened.inner_text("#change")
        opened.click("#sure button.main")
        until(opened, "document.getElementById('batching').value === 'continuous'")
        opened.select_option("#slots", "4")
        assert "would share slots: 4" in opened.inner_text("#change")
        opened.keyboard.press("Escape")
        until(opened, "document.getElementById('slots').value === '16'")
    assert puts == [] and get(server, "/admin/scheduling").json() == settings


def test_a_change_that_is_wanted_is_made_from_the_keyboard(server, opened, puts):
    with complete(server) as response:
        response.read()
    until(opened, "slotwise.history.last?.running === 0 && slotwise.history.last.waiting === 0")
    opened.select_option("#slots", "8")
    assert re.fullmatch(r"A request of others ended [\d.]+ m?s ago\.", opened.inner_text("#others"))
    first, second = opened.query_selector_all("#sure button")
    assert first.inner_text() == "Leave it as it is" and first.get_attribute("class") == "main", "the first button"
    assert second.inner_text() == "Change it" and second.get_attribute("class") is None
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.textContent") == "Change it"
    opened.keyboard.press("Enter")
    until(opened, "slotwise.history.segments.at(-1).capacity === 8")
    assert puts == [{"max_num_seqs": 8}] and get(server, "/admin/scheduling").json()["max_num_seqs"] == 8
    changing(opened, lambda: opened.select_option("#slots", "16"))
    until(opened, "slotwise.history.segments.at(-1).capacity === 16")


def test_requests_of_this_page_are_no_others(chromium, tmp_path):
    with (serving("--max-num-seqs", "16", log=tmp_path / "stderr") as alone,
          looked_at(chromium, alone.url + "/timeline") as (page, _)):
        until(page, "slotwise.history.run !== null")
        page.click("#send")
        until(page, "!document.getElementById('send').disabled")
        page.select_option("#slots", "4")
        assert not page.is_visible("#sure")
        until(page, "slotwise.history.segments.at(-1).capacity === 4")
        before = page.evaluate("slotwise.history.requests.size")
        with complete(alone) as response:
            response.read()
        until(page, f"slotwise.history.requests.size > {before}")
        until(page, "[...slotwise.history.requests.values()].at(-1).flushed")  # the last entry about it
        page.evaluate("slotwise.ahead += 65e3")
        page.select_option("#slots", "16")
        assert not page.is_visible("#sure"), "the other's request ended more than a minute ago"
        until(page, "slotwise.history.segments.at(-1).capacity === 16")
        with looked_at(chromium, alone.url + "/timeline") as (later, _):
            until(later, "slotwise.history.requests.size > 0 && slotwise.history.last?.running === 0")
            later.evaluate("slotwise.ahead += 27 * 60e3")
            later.select_option("#slots", "4")
            assert not later.is_visible("#sure"), "nor is it asked where the page was opened long after the last step"
            until(later, "slotwise.history.segments.at(-1).capacity === 4")


def test_slots_that_no_request_needs_are_not_counted_against_a_server(chromium, tmp_path):
    with (serving("--max-num-seqs", "16", log=tmp_path / "stderr") as alone,
          looked_at(chromium, alone.url + "/timeline") as (page, _)):
        until(page, "slotwise.history.run !== null")
        with complete(alone) as response:
            response.read()
        until(page, "slotwise.history.last?.running === 0")
        extent = "slotwise.history.first, slotwise.history.end"
        assert page.evaluate(f"slotwise.history.useful({extent})") <= 1 / 16
        assert page.evaluate(f"slotwise.history.needed({extent})") == 1
        page.evaluate("slotwise.view.fit()")
        frame(page)
        assert "100% of the needed slots used" in written(page, "heads")


def test_a_change_that_the_server_refuses_is_told_and_taken_back(chromium, tmp_path):
    static = ("--max-num-seqs", "4", "--batching", "static", "--batch-size", "4")
    with (serving(*static, log=tmp_path / "stderr") as alone,
          looked_at(chromium, alone.url + "/timeline") as (page, _)):
        until(page, "slotwise.history.run !== null")
        page.select_option("#slots", "2")
        until(page, "document.getElementById('said').textContent.startsWith('That did not work')")
        until(page, "document.getElementById('slots').value === '4'")


def test_the_address_names_a_request(chromium, tmp_path):
    with serving("--max-num-seqs", "4", log=tmp_path / "stderr") as alone:
        for name in ("first", "second", "third"):
            body = {"prompt": "def add(a, b):", "max_tokens": 5, "ignore_eos": True}
            httpx.post(alone.url + "/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=120)
        with looked_at(chromium, alone.url + "/timeline#request=second") as (page, complaints):
            until(page, "slotwise.pinned !== null")
            frame(page)
            assert "cmpl-second-" in page.inner_text("#story")
            low, high = page.evaluate("slotwise.view.shown")
            join = page.evaluate("slotwise.history.requests.get(slotwise.pinned).joins[0].ordinal")
            assert low <= join < high and not page.evaluate("slotwise.view.following")
            page.evaluate("location.hash = 'request=cmpl-third'")
            until(page, "document.getElementById('story').textContent.includes('cmpl-third-')")
            page.evaluate("location.hash = 'request=unknown'")
            frame(page)
            assert "cmpl-third-" in page.inner_text("#story") and complaints == []
