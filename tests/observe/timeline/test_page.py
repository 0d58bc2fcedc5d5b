"""The timeline with a saved log, in a real browser."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.browser import browser
from support.played import LIMITS, Play
from support.timeline_logs import cells, everything
from support.timeline_pages import compare, frame, looked_at, written

from slotwise.core.record import NO_STEP, RankSpan, StepRecord
from slotwise.observe import event_log
from slotwise.observe.timeline import page_builder as timeline

EVIL = "</script><script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def entries():
    return everything()


def saved_page(entries, folder, name=EVIL):
    path = folder / "page.html"
    path.write_bytes(timeline.saved(name, [event_log.encode(entry) + b"\n" for entry in entries]))
    return path.as_uri()


@pytest.fixture(scope="module")
def url(entries, tmp_path_factory):
    return saved_page(entries, tmp_path_factory.mktemp("timeline"))


@pytest.fixture
def opened(chromium, url):
    with looked_at(chromium, url) as (page, complaints):
        page.wait_for_function("slotwise.history.steps.length > 0")
        frame(page)
        yield page
        assert complaints == [] and page.evaluate("window.hacked") is None


def steps_of(entries):
    return [entry for entry in entries if isinstance(entry, StepRecord) and entry.step != NO_STEP]


@pytest.mark.parametrize("unit", ["steps", "seconds"])
def test_every_cell_drawn_is_what_the_plan_says(opened, entries, unit):
    opened.click(f"#{unit}")
    seen = compare(opened, cells(entries))
    assert {"prefill", "decode", "held", "recompute", "empty"} <= seen.keys(), seen


def test_a_row_computed_after_its_request_has_ended_is_told_apart(chromium, tmp_path):
    entries = everything(seed=2, depth=1)
    with looked_at(chromium, saved_page(entries, tmp_path, "depth 1")) as (page, complaints):
        page.wait_for_function("slotwise.history.steps.length > 0")
        assert compare(page, cells(entries)).keys() >= {"void", "held"}
        assert complaints == []


def test_what_follows_a_wrong_draft_is_not_computed_again(chromium, tmp_path):
    entries = everything(seed=3, drafts=True)
    verified = [one for step in steps_of(entries) for one in step.verified]
    assert any(right < number for number, right in verified)
    with looked_at(chromium, saved_page(entries, tmp_path, "drafts")) as (page, complaints):
        page.wait_for_function("slotwise.history.steps.length > 0")
        assert "decode" in compare(page, cells(entries))
        told = page.evaluate("[...slotwise.history.requests.values()].map((one) => [one.drafts, one.draftsRight])")
        assert tuple(map(sum, zip(*told, strict=True))) == tuple(map(sum, zip(*verified, strict=True)))
        assert complaints == []


def test_the_story_of_a_request_is_told_and_kept(opened, entries):
    step = next(index for index, step in enumerate(steps_of(entries)) if any(cached for _, cached in step.admitted))
    number, cached = next(one for one in steps_of(entries)[step].admitted if one.num_cached)
    slot = steps_of(entries)[step].plan.slots[steps_of(entries)[step].plan.request_ids.index(number)]
    opened.evaluate("(step) => slotwise.view.show(step, step + 20)", step)
    frame(opened)
    x, y = opened.evaluate("""([step, slot]) => {
      const box = slotwise.canvas.getBoundingClientRect(), { layout, view } = slotwise;
      const { top, height } = layout.stripOf[slot];
      return [box.left + view.x(step + 0.5), box.top + top + height / 2];
    }""", [step, slot])
    opened.mouse.move(x, y)
    story = opened.inner_text("#story")
    assert f"request {number}" in story and f"{cached} tokens found in the cache" in story
    spans = next(lookup.spans for lookup in steps_of(entries)[step].lookups if lookup.request_id == number)
    assert all(span.cause.replace("_", " ") in story for span in spans)
    opened.mouse.click(x, y)
    opened.mouse.move(5, 5)
    assert f"request {number}" in opened.inner_text("#story")
    opened.keyboard.press("Escape")
    assert f"request {number}" not in opened.inner_text("#story")


def test_why_somebody_waits_is_what_the_log_says(opened, entries):
    waited = {}
    for step in steps_of(entries):
        for number, reason in step.plan.refused:
            waited.setdefault(number, set()).add(reason)
    number, reasons = max(waited.items(), key=lambda item: len(item[1]))
    opened.evaluate("(number) => slotwise.pin(number)", number)
    story = opened.inner_text("#story")
    words = {"no_slot": "no slot free", "no_blocks": "no cache blocks left", "token_budget": "token budget spent",
             "batch_running": "the batch must end first"}
    assert all(words.get(reason, reason.replace("_", " ")) in story for reason in reasons), (reasons, story)


def test_the_keys_move_the_view(opened):
    view = "[slotwise.view.from, slotwise.view.to]"
    opened.keyboard.press("0")
    low, high = opened.evaluate(view)
    opened.keyboard.press("+")
    closer = opened.evaluate(view)
    assert closer[1] - closer[0] < high - low
    opened.keyboard.press("ArrowLeft")
    assert opened.evaluate(view)[0] < closer[0]
    opened.keyboard.press("t")
    assert opened.evaluate("slotwise.view.unit") == "seconds"
    opened.keyboard.press("Shift+ArrowRight")
    opened.keyboard.press("Shift+ArrowDown")
    assert "slot 1" in opened.inner_text("#story")
    opened.keyboard.press("?")
    assert opened.is_visible("#keys") and "earlier, later" in opened.inner_text("#keys")
    opened.keyboard.press("Escape")
    opened.wait_for_selector("#keys", state="hidden")
    opened.wait_for_function("!document.activeElement.closest('dialog')")  # it gets no keys any more
    before = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.keyboard.press("d")
    opened.wait_for_function("before => getComputedStyle(document.body).backgroundColor != before", arg=before)


def saved(opened, button):
    opened.click("#save summary")
    with opened.expect_download() as download:
        opened.click(f"#{button}")
    return download.value.path().read_bytes()


def test_pictures_are_saved(opened):
    opened.keyboard.press("0")
    frame(opened)
    drawing = ElementTree.fromstring(saved(opened, "svg"))
    fills = [shape.get("fill") for shape in drawing.iter("{http://www.w3.org/2000/svg}rect")]
    soft = opened.evaluate("slotwise.palette.hues.map((hue) => hue.soft)")
    assert len([fill for fill in fills if fill in soft]) > 40
    assert "url(#held)" in fills and drawing.find(".//*[@id='held']") is not None
    picture = saved(opened, "png")
    width, height = (int.from_bytes(picture[start:start + 4]) for start in (16, 20))
    assert picture.startswith(b"\x89PNG") and [width, height] == opened.evaluate("slotwise.size.map((one) => 2 * one)")


def test_the_trace_has_every_row_of_every_step(opened, entries):
    trace = json.loads(saved(opened, "trace"))["traceEvents"]
    steps = steps_of(entries)
    pieces = [event for event in trace if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["pid"] == 1 for event in pieces)
    assert len([event for event in pieces if event["tid"] == 0]) == len(steps)
    rows = sum(event["args"]["steps"] for event in pieces if event["tid"] > 0)
    assert rows == sum(len(step.plan.request_ids) for step in steps)
    names = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names == {"steps", *(f"slot {slot}" for slot in range(6))}
    waits = [event for event in trace if event.get("cat") == "queue"]
    assert len(waits) % 2 == 0 and {event["ph"] for event in waits} == {"b", "e"}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 390])
def test_the_page_fits_and_fetches_nothing(chromium, url, width, dark):
    with looked_at(chromium, url, width=width, dark=dark) as (page, complaints):
        fetched = []
        page.on("request", lambda request: fetched.append(request.url))
        page.wait_for_function("slotwise.history.steps.length > 0")
        frame(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (sum(lightness) < 3 * 40) == dark
        assert not page.is_visible("#send") and not page.is_visible("#compare")
        assert complaints == [] and fetched == []


SLOTS = 40


@pytest.fixture(scope="module")
def sparse():
    """A run with far more slots than its cache can fill."""
    limits = replace(LIMITS, max_num_seqs=SLOTS, max_num_batched_tokens=SLOTS, enable_prefix_caching=False)
    return Play(4, limits=limits).run(40).entries


@pytest.fixture
def roomy(chromium, sparse, tmp_path):
    with looked_at(chromium, saved_page(sparse, tmp_path)) as (page, complaints):
        page.wait_for_function("slotwise.history.steps.length > 0")
        frame(page)
        yield page
        assert complaints == []


def test_ranks_are_lines_below_the_lanes(chromium, tmp_path):
    def ranked(entry):
        if not isinstance(entry, StepRecord) or entry.step == NO_STEP:
            return entry
        middle = (entry.started_ns + entry.ended_ns) // 2
        ranks = RankSpan(0, entry.started_ns, middle), RankSpan(1, middle, entry.ended_ns)
        return entry._replace(result=entry.result._replace(ranks=ranks))

    entries = list(map(ranked, everything()))
    with looked_at(chromium, saved_page(entries, tmp_path, "ranks")) as (page, complaints):
        page.wait_for_function("slotwise.history.ranks === 2")
        page.keyboard.press("0")
        frame(page)
        band, (low, high), series = page.evaluate(
            "[slotwise.layout.ranks, slotwise.view.shown, slotwise.palette.series]")
        spans = [shape for shape in ElementTree.fromstring(saved(page, "svg")).iter("{http://www.w3.org/2000/svg}rect")
                 if shape.get("fill") == series and 0 <= float(shape.get("y")) - band["top"] < band["height"]]
        rows = [[one for one in spans if (float(one.get("y")) - band["top"] < band["height"] / 2) == is_first]
                for is_first in (True, False)]
        assert len(rows[0]) == len(rows[1]) == high - low
        ends = {round(float(one.get("x")) + float(one.get("width"))) for one in rows[0]}
        assert ends & {round(float(one.get("x"))) for one in rows[1]}, "one rank begins where the other ends"
        assert complaints == []


def lanes_of(page):
    frame(page)
    return page.evaluate("slotwise.layout.strips.map(({ first, end, folded }) => [first, end, folded])")


def test_slots_that_never_had_a_request_are_one_thin_line_with_a_count(roomy, sparse):
    used = 1 + max(slot for step in cells(sparse) for slot in step)
    assert 3 < used < SLOTS - 3
    open_lanes = [[slot, slot + 1, False] for slot in range(used)]
    assert lanes_of(roomy) == [*open_lanes, [used, SLOTS, True]]
    assert compare(roomy, cells(sparse))["empty"]
    drawing = ElementTree.fromstring(saved(roomy, "svg"))
    assert f"▸ {SLOTS - used} idle" in [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    heights = roomy.evaluate("slotwise.layout.strips.map((strip) => strip.height)")
    assert heights[-1] < heights[0]


def test_idle_lanes_are_unfolded_and_folded_by_pointer_button_and_key(roomy):
    used, folded = len(lanes_of(roomy)) - 1, lanes_of(roomy)
    unfolded = [[slot, slot + 1, False] for slot in range(SLOTS)]
    x, y = roomy.evaluate("""() => {
      const box = slotwise.canvas.getBoundingClientRect(), { top, height } = slotwise.layout.strips.at(-1);
      return [box.left + 200, box.top + top + height / 2];
    }""")
    roomy.mouse.move(x, y)
    assert f"Slots {used} to {SLOTS - 1} had no request" in roomy.inner_text("#story")
    roomy.mouse.click(x, y)
    assert lanes_of(roomy) == unfolded and roomy.get_attribute("#fold", "aria-pressed") == "true"
    roomy.click("#fold")
    assert lanes_of(roomy) == folded and roomy.get_attribute("#fold", "aria-pressed") == "false"
    roomy.keyboard.press("f")
    assert lanes_of(roomy) == unfolded
    roomy.keyboard.press("f")
    for _ in range(SLOTS):
        roomy.keyboard.press("Shift+ArrowDown")
    assert f"slot {used - 1}" in roomy.inner_text("#story")


def test_without_a_run_of_idle_slots_nothing_is_folded(opened):
    assert not opened.is_visible("#fold")
    assert lanes_of(opened) == [[slot, slot + 1, False] for slot in range(6)]


WHY = {"no_slot": "no slot free", "no_blocks": "no cache blocks left", "token_budget": "token budget spent",
       "batch_running": "the batch must end first", "one_at_a_time": "one at a time"}


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("shown", [(0, 10**6), (0, 40), (100, 220)], ids=["all", "few", "some"])
def test_why_requests_wait_is_written_at_any_width(chromium, url, entries, width, shown):
    with looked_at(chromium, url, width=width) as (page, _):
        page.wait_for_function("slotwise.history.steps.length > 0")
        low, high = shown[0], min(shown[1], len(steps_of(entries)))
        page.evaluate("([low, high]) => slotwise.view.show(low, high)", [low, high])
        frame(page)
        found = page.evaluate("([low, high]) => slotwise.history.reasons.all.filter((run) => run.first < high"
                              " && run.end > low).map((run) => run.value)", [low, high])
        words = " ".join(written(page, "reasons"))
        assert found and words
        missing = {reason for reason in found if WHY[reason] not in words and reason.replace("_", " ") not in words}
        assert len(missing) == (int(words.rsplit(" +", 1)[1]) if " +" in words else 0)


def test_a_finger_taps_what_a_mouse_points_at(chromium, url, entries):
    context = chromium.new_context(viewport={"width": 400, "height": 860}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(url)
    page.wait_for_function("window.slotwise && slotwise.history.steps.length > 0")
    page.evaluate("slotwise.view.show(0, 30)")
    page.wait_for_function("document.querySelector('#story').innerText.includes('Tap a request for its story.')")
    frame(page)
    place = """(slot) => {
      const box = slotwise.canvas.getBoundingClientRect(), { layout, view } = slotwise;
      return [box.left + view.x(5.5), box.top + layout.strips[slot].top + 5];
    }"""
    number = cells(entries)[5][0].number
    page.touchscreen.tap(*page.evaluate(place, 0))
    assert f"request {number}" in page.inner_text("#story") and "step 5" in page.inner_text("#story")
    page.click("#help")
    assert "tap a request to pin it" in page.inner_text("#keys") and "click a request" not in page.inner_text("#keys")
    context.close()


FOLD = """([lines, most]) => {
  const history = new slotwise.history.constructor(most);
  for (const line of lines) history.take(JSON.parse(line));
  const { first, end } = history;
  const cells = [];
  for (let ordinal = first; ordinal < end; ordinal++) {
    cells.push(Object.fromEntries(history.lanes.map((lane, slot) => [slot, history.spanAt(slot, ordinal)])
      .filter(([, span]) => span).map(([slot, span]) => [slot, [span.number, span.kind]])));
  }
  return { first, end, cells, requests: history.requests.size, waits: history.waits.length,
    spans: history.lanes.reduce((sum, lane) => sum + lane.length, 0),
    queued: history.waits.filter((wait) => wait.to === null).length };
}"""


def fold(opened, entries, most=10**6):
    return opened.evaluate(FOLD, [[event_log.encode(entry).decode() for entry in entries], most])


def as_told(steps):
    return [{str(slot): [cell.number, cell.kind] for slot, cell in step.items()} for step in steps]


def test_only_so_many_steps_are_remembered(opened, entries):
    whole, bounded = fold(opened, entries), fold(opened, entries, 100)
    assert bounded["end"] == whole["end"] == len(steps_of(entries)) and 100 <= bounded["end"] - bounded["first"] <= 120
    assert bounded["cells"] == as_told(cells(entries))[bounded["first"]:]
    for what in ("requests", "waits", "spans"):
        assert 0 < bounded[what] < whole[what], what


def test_after_a_gap_nobody_waits_who_was_not_named_again(opened, entries):
    """The stream leaves out a part and then names who lives, as `/events` does for a viewer who was too slow."""
    places = [place for place, entry in enumerate(entries) if isinstance(entry, StepRecord)
              and entry.counters.num_waiting > 2]
    cut = places[len(places) // 2]
    rest = entries[cut + 12:]
    asked = {entry.number: entry for entry in entries[:cut + 12] if isinstance(entry, event_log.RequestEntry)}
    for entry in entries[:cut + 12]:
        for end in getattr(entry, "ended", ()):
            asked.pop(end.request_id, None)
    found = fold(opened, [*entries[:cut], event_log.Gap(12), entries[0], *asked.values(), *rest])
    assert found["queued"] == 0
    after = cells(entries)[-len(steps_of(rest)):]
    drawn = found["cells"][-len(after):]
    assert [{slot: cell[0] for slot, cell in step.items()} for step in drawn] == [
        {str(slot): cell.number for slot, cell in step.items()} for step in after]
