"""The report in a real browser: nothing complains, nothing sticks out, and it does what it says."""

from __future__ import annotations

import copy

import pytest
from support.browser import browser, opened
from support.report_pages import RESULT

from slotwise.measure.bench.report.comparison_page import render, slot_charts

EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
OVERLAPS = """() => {
  const found = [];
  for (const picture of document.querySelectorAll("svg.plot, svg.lanes, svg.bars")) {
    const boxes = [...picture.querySelectorAll("text")].filter((text) => text.getClientRects().length).map(
      (text) => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([one, a], index) => boxes.slice(index + 1).forEach(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 0.5 && down > 3) found.push(`${one} | ${other}`);
    }));
  }
  return found;
}"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    changed = copy.deepcopy(RESULT) | {"model": EVIL}
    path.write_text(render(changed), "utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 390])
def test_the_page_fits_and_nothing_complains(chromium, report, width, dark):
    with opened(chromium, report, width=width, dark=dark) as (page, complaints):
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERLAPS) == []
        lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (sum(lightness) < 3 * 40) == dark
        assert page.evaluate("window.hacked") is None and EVIL in page.inner_text(".facts")
        assert complaints == []


def test_one_of_the_two_scales_is_shown(chromium, report):
    with opened(chromium, report) as (page, complaints):
        assert page.is_visible(".charts.seconds") and not page.is_visible(".charts.steps")
        page.click("label[for=by-steps]")
        assert page.is_visible(".charts.steps") and not page.is_visible(".charts.seconds")
        assert page.evaluate(OVERLAPS) == []
        page.focus("#by-steps")
        page.keyboard.press("ArrowLeft")
        assert page.is_visible(".charts.seconds")
        assert complaints == []


def test_the_scales_change_without_scripts_too(chromium, report):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    page.click("label[for=by-steps]")
    assert page.is_visible(".charts.steps") and not page.is_visible(".charts.seconds")
    context.close()


def test_pointing_at_a_request_follows_it_through_every_chart(chromium, report):
    with opened(chromium, report) as (page, complaints):
        before = page.inner_text("#story")
        page.hover(".charts.seconds figure:last-child g[data-request='0'] path.decode")
        lit = page.evaluate("[...document.querySelectorAll('g.lit')].map((cells) => cells.dataset.request)")
        assert lit == ["0"] * 2 * len(RESULT["runs"])
        assert page.inner_text("#story").startswith("request 0 · slot 0 · steps 0 to")
        page.hover("h1")
        assert page.inner_text("#story") == before and page.query_selector("g.lit") is None
        assert complaints == []


def test_a_tap_follows_a_request_until_the_next_tap(chromium, report):
    context = chromium.new_context(viewport={"width": 400, "height": 800}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(report.as_uri())
    assert "Tap a request to follow it" in page.inner_text("#story") and "Point at" not in page.inner_text("#story")
    page.tap(".charts.seconds figure:last-child g[data-request='0'] path.decode")
    assert page.inner_text("#story").startswith("request 0 · slot 0")
    page.tap(".charts.seconds figcaption")
    assert "Tap a request" in page.inner_text("#story") and page.query_selector("g.lit") is None
    context.close()


def test_charts_scroll_inside_their_figure_on_a_phone(chromium, report):
    with opened(chromium, report, width=390) as (page, _):
        inner, outer = page.evaluate("(() => { const charts = document.querySelector('.charts.seconds');"
                                     " return [charts.scrollWidth, charts.clientWidth]; })()")
        assert inner > 1.9 * outer and outer <= 390


def test_the_page_prints_within_its_paper(chromium, report):
    with opened(chromium, report, width=700) as (page, complaints):  # A4 less its margins, at 96 dots per inch
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.scrollWidth") <= 700
        assert not page.is_visible(".switch") and complaints == []
        assert len(page.pdf(format="A4")) < 2_000_000


def test_a_chart_of_its_own_is_a_picture(chromium, tmp_path):
    charts = slot_charts(RESULT)
    (tmp_path / "static.svg").write_text(charts["Static"], "utf-8")
    (tmp_path / "page.html").write_text('<link rel="icon" href="data:,"><img src="static.svg">', "utf-8")
    with opened(chromium, tmp_path / "page.html") as (page, complaints):
        size = page.evaluate("[document.images[0].naturalWidth, document.images[0].naturalHeight]")
        assert size[0] == 1000 and 100 < size[1] < 400 and complaints == []
