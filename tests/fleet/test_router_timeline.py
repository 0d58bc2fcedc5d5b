"""The timeline of a router in a real browser: it shows one replica, and offers the others."""

from __future__ import annotations

from typing import Any

from support.browser import browser
from support.live_server import Server, eventually
from support.scale_door import Behind
from support.timeline_pages import looked_at


def events(two: Behind, name: str) -> str:
    found: Server = next(one for one in two.replicas if one.url.endswith(name))
    return found.get("/events?follow=0").text


def test_the_timeline_shows_the_replica_that_is_chosen_and_sends_to_it(two: Behind) -> None:
    first, second = [one["name"] for one in two.states()]
    body = {"prompt": [40, 41], "max_tokens": 3}
    assert two.door.post(f"/v1/completions?replica={first}", body, **{"X-Request-Id": "seen"}).status_code == 200
    with browser() as chromium, looked_at(chromium, two.door.url + "/timeline") as (page, complaints):

        def shows(held: str) -> Any:
            return page.evaluate(f"Boolean(window.slotwise) && {held}")

        seen = "[...slotwise.history.requests.values()].some((one) => one.id.startsWith('cmpl-seen-'))"
        eventually(lambda: shows(seen))
        assert page.eval_on_selector_all("#replica option", "all => all.map((one) => one.value)") == [first, second]
        assert page.is_visible("#replica") and page.input_value("#replica") == first
        assert page.inner_text("#state") == "live"
        page.select_option("#replica", second)
        page.wait_for_url("**/timeline?replica=*")
        eventually(lambda: shows("slotwise.history.run !== null"))
        assert page.input_value("#replica") == second and not shows(seen)
        page.click("#send")
        eventually(lambda: shows("!document.getElementById('send').disabled && slotwise.history.steps.length > 0"))
        assert complaints == []
    name = '"name":"cmpl-timeline-'
    assert events(two, second).count(name) >= 24 and name not in events(two, first)
