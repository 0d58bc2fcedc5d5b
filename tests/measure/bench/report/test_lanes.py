"""The slot x step charts: what is drawn is what was computed."""

from __future__ import annotations

import re
from collections import defaultdict
from xml.etree import ElementTree

import pytest
from support.report_pages import RESULT, Charts, text_of, with_runs

from slotwise.measure.bench.report import data, slot_chart
from slotwise.measure.bench.report.comparison_page import render, slot_charts

KINDS = ("prefill", "decode", "held")


@pytest.mark.parametrize("view", ["seconds", "steps"])
def test_the_boxes_of_a_chart_cover_its_runs_and_nothing_else(view):
    charts = Charts(render(RESULT)).views[view]
    assert len(charts) == len(RESULT["runs"])
    scales = set()
    for drawn, run in zip(charts, RESULT["runs"], strict=True):
        chart = run["chart"]
        edges = chart["step_ends"] if view == "seconds" else list(range(chart["steps"] + 1))
        scale = max(box[2] for box in drawn["lane"]) / edges[-1]
        scales.add(round(scale, 2))
        for kind in KINDS:
            wanted = [[slot, edges[first], edges[first + steps]]
                      for slot, first, steps, name, *_ in chart["runs"] if name == kind]
            lane_tops = sorted({box[1] for box in drawn["lane"]})
            found = [[lane_tops.index(top), left / scale, right / scale] for left, top, right, _ in drawn[kind]]
            assert len(found) == len(wanted)
            for one, other in zip(sorted(found), sorted(wanted), strict=True):
                assert one == pytest.approx(other, abs=0.02 / scale)
    assert len(scales) == 1, "the charts do not share one scale"


def test_padding_takes_its_part_of_the_cells_area():
    static = next(run for run in RESULT["runs"] if run["name"] == "static")
    index = RESULT["runs"].index(static)
    drawn = Charts(render(RESULT)).views["steps"][index]
    prompts = {(slot, step): tokens for slot, step, steps, kind, _, tokens in static["chart"]["runs"]
               if kind == "prefill" and steps == 1}
    cell = max(box[2] for box in drawn["lane"]) / static["chart"]["steps"]
    height = drawn["lane"][0][3] - drawn["lane"][0][1]
    area = sum((right - left) * (bottom - top) for left, top, right, bottom in drawn["padding"]) / cell / height
    expected = sum(pad / (pad + prompts[slot, step]) for slot, step, pad in static["chart"]["pads"])
    assert static["chart"]["pads"] and area == pytest.approx(expected, rel=0.02)


def test_a_request_keeps_its_hue_in_every_chart_and_slots_change_hue_with_their_request():
    page = render(RESULT)
    hues = defaultdict(set)
    for hue, request in re.findall(r'<g class="(h\d+)" data-request="(\d+)">', page):
        hues[request].add(hue)
    assert len(hues) == 24 and all(len(found) == 1 for found in hues.values())
    assert hues["0"] != hues["1"] != hues["2"]


def test_a_request_that_is_left_out_of_steps_is_drawn_as_paused():
    spans = [data.ChartSpan(0, 0, 2, "decode", 7, 2), data.ChartSpan(0, 5, 1, "decode", 7, 1),
              data.ChartSpan(0, 8, 1, "decode", 9, 1)]
    idle = [span for span in slot_chart.with_idle(spans) if span.kind == "idle"]
    assert idle == [data.ChartSpan(0, 2, 3, "idle", 7, 0)]


def test_slots_that_were_never_used_share_one_lane():
    changed = with_runs("continuous")
    changed["runs"][0]["chart"]["slots"] = 40
    page = render(changed)
    assert "36 more slots, never used" in page
    assert len({box[1] for box in Charts(page).views["steps"][0]["lane"]}) == 5


def test_a_large_chart_stays_light():
    chart = {"slots": 64, "steps": 3000, "step_ends": [step * 0.01 for step in range(3001)], "truncated": True,
             "pads": [], "runs": [[slot, first, 20, "decode", slot * 150 + first // 20, 20]
                                  for slot in range(64) for first in range(0, 3000, 20)]}
    changed = with_runs("continuous")
    changed["runs"][0] |= {"chart": chart, "num_slots": 64}
    page = render(changed)
    assert page.count("<path") + page.count("<rect") + page.count("<g ") < 1500
    boxes = Charts(page).views["steps"][0]["decode"]
    assert len(boxes) == 64 * 150
    assert "drawn: the first 3,000 steps" in text_of(page)


def test_a_chart_wider_than_the_page_grows_so_that_the_shortest_run_is_no_sliver():
    changed = with_runs("static", "continuous")
    ends = changed["runs"][1]["chart"]["step_ends"]
    changed["runs"][1]["chart"]["step_ends"] = [end / 10 for end in ends]
    zooms = [float(zoom) for zoom in re.findall(r"--zoom:([\d.]+)%", render(changed))]
    assert zooms[0] > 150 and zooms[0] <= 500
    assert [float(zoom) for zoom in re.findall(r"--zoom:([\d.]+)%", render(RESULT))] == [100.0, 100.0]


def test_slot_charts_are_files_of_their_own():
    charts = slot_charts(RESULT)
    assert [*charts] == ["One at a time", "Static", "Dynamic", "Orca", "Continuous"]
    for chart in charts.values():
        root = ElementTree.fromstring(chart)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and int(root.get("width")) == 1000
