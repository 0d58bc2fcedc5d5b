"""The page: everything measured is on it, escaped, legible and self-contained, and anything measured can be drawn."""

from __future__ import annotations

import copy
import json
import re
from importlib import resources
from typing import Any
from xml.etree import ElementTree

import pytest
from support.example_result import result as example
from support.report_pages import RESULT, Charts, text_of, with_runs
from support.virtual import queued, stand

from slotwise.measure.bench.comparison import DISCIPLINES, Comparison, contenders
from slotwise.measure.bench.report import data, plots, slot_chart, words
from slotwise.measure.bench.report.comparison_page import render, slot_charts, write_report


def test_every_figure_of_the_table_is_the_results():
    page = text_of(render(RESULT))
    for run in RESULT["runs"]:
        for text in (words.figure(run["output_throughput"]), words.seconds(run["ttft"]["p99"]),
                     words.seconds(run["e2e"]["p50"]), f"{run['steps']:,}", words.figure(run["cost_per_million"]),
                     f"{run['waste']['held_row_steps']:,}", f"{run['waste']['padded_tokens']:,}"):
            assert text in page


def test_costs_are_shown_only_with_a_price():
    changed = copy.deepcopy(RESULT)
    for run in changed["runs"]:
        run["cost_per_million"] = None
    assert "cost of 1 M tokens" in text_of(render(RESULT))
    assert "cost of" not in text_of(render(changed))


def test_the_parts_of_a_stack_are_as_long_as_the_slot_steps_they_stand_for():
    page = render(with_runs("static"))
    figure = page[page.index("Slot-steps by what they were used for"):]
    widths = dict(re.findall(r'width="([\d.]+)%" height="14" class="part (\w+)"', figure[:figure.index("</svg>")]))
    parts = {kind: float(width) for width, kind in widths.items()}
    run = with_runs("static")["runs"][0]
    total = run["steps"] * run["num_slots"]
    assert parts["held"] == pytest.approx(100 * run["waste"]["held_row_steps"] / total, abs=0.01)
    assert parts["useful"] == pytest.approx(100 * run["occupancy"], abs=0.01)
    assert sum(parts.values()) == pytest.approx(100, abs=0.02)


def test_a_measurement_and_its_theory_share_a_color_and_differ_in_stroke():
    swept = data.read(RESULT).sweeps[0]
    assert re.findall(r'class="curve (c\d \w+)"', plots.sweep(swept)) == [
        "c0 theory", "c0 solid", "c1 theory", "c1 solid", "c2 theory", "c2 solid"]
    assert re.findall(r"> ([^<]+)</li>", plots.sweep_legend(swept)) == [
        "fixed", "uniform 1–128", "log-normal", "theory"]


def test_a_theory_named_after_its_measurement_belongs_to_it():
    series = [data.Series(label, ((1, 1), (2, 2)), style, subject) for label, style, subject in (
        ("decode, a + b rows", "theory", "decode"), ("decode", "measured", ""), ("prefill", "measured", ""))]
    swept = data.Sweep("rows", data.AxisLabel("rows", log=True), data.AxisLabel("tokens", log=True), tuple(series))
    assert plots.series_places(swept) == [0, 0, 1]
    assert re.findall(r"> ([^<]+)</li>", plots.sweep_legend(swept)) == ["decode", "prefill", "theory"]


def test_text_of_the_result_is_escaped():
    evil = "</title></script><script>window.hacked = 1</script>\"'&"
    changed = copy.deepcopy(RESULT) | {"model": evil}
    changed["environment"]["machine"] = evil
    changed["workload"]["description"] = {evil: evil}
    changed["runs"][0] |= {"name": evil, "label": evil}
    changed["sweeps"][0] |= {"title": evil, "notes": [evil], "x": {"label": evil, "log": False}}
    changed["sweeps"][0]["series"][0]["label"] = evil
    page = render(changed)
    assert "<script>window" not in page and page.count("<script>") == 1 and page.count("</title>") == render(
        RESULT).count("</title>")
    for chart in slot_charts(changed).values():
        ElementTree.fromstring(chart)


def test_nothing_is_fetched_and_ids_are_unique():
    page = render(RESULT)
    assert not re.findall(r"""(?:src|href)="(?!data:)|url\((?!#)|@import""", page)
    ids = Charts(page).ids
    assert len(ids) == len({*ids})


@pytest.mark.parametrize(("low", "high"), [(0.02, 46.0), (1.0, 1.0), (0.9, 1.1), (3.0, 30.0), (1e-6, 1e6)])
def test_logarithmic_axes_hold_all_values_with_a_few_ticks(low, high):
    axis = plots.logarithmic("", [low, high], str)
    assert axis.low <= low * 1.001 and axis.high >= high * 0.999 and 2 <= len(axis.ticks) <= 6


def contrast(one: str, other: str) -> float:
    """The contrast of two colors as WCAG defines it."""
    def luminance(color: str) -> float:
        digits = color.lstrip("#")
        digits = digits if len(digits) == 6 else "".join(digit * 2 for digit in digits)
        channels = (int(digits[at:at + 2], 16) / 255 for at in (0, 2, 4))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_colors_stand_out_from_the_page(theme):
    sheet = (resources.files("slotwise.measure.bench.report") / "assets" / "chart.css").read_text("utf-8")
    block = re.findall(r":root \{(.*?)\}", sheet, flags=re.DOTALL)[theme]
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block))
    for name in ("ink", "quiet", "accent"):
        assert contrast(colors[name], colors["page"]) >= 4.5, name
    for name in [f"c{number}" for number in range(10)] + ["loss"]:
        assert contrast(colors[name], colors["page"]) >= 3, name
    assert contrast(colors["loss"], colors["loss-ground"]) >= 3


def sheet_of(package: str, name: str) -> str:
    return (resources.files(package) / "assets" / name).read_text("utf-8")


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_waste_has_one_color_and_one_name_here_and_in_the_timeline(theme):
    """Hatched red is wasted computation."""
    blocks = [re.findall(r":root(?:\.dark)? \{(.*?)\}", sheet, flags=re.DOTALL)[theme] for sheet in (
        sheet_of("slotwise.measure.bench.report", "chart.css"), sheet_of("slotwise.observe.timeline", "base.css"))]
    report, timeline = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block)) for block in blocks)
    for name in ("loss", "loss-ground"):
        assert report[name] == timeline[name]
    palette = sheet_of("slotwise.observe.timeline", "palette.js")
    kinds = dict(re.findall(r'\["(\w+)", "([^"]+)"\]', palette[palette.index("KINDS"):palette.index("class")]))
    assert {kind: kinds[kind] for kind in kinds.keys() & slot_chart.KINDS} == {
        kind: words for kind, words in slot_chart.KINDS.items() if kind in kinds}
    wasted = {kind for kind, words in kinds.items() if words.startswith("wasted: ")}
    assert wasted == {"held", "padding", "void"}
    assert {kind for kind, words in slot_chart.KINDS.items() if words.startswith("wasted: ")} == wasted - {"void"}
    for name in wasted:
        assert re.search(rf"\b{name}: hatched\(", palette), f"{name} is not hatched"
    hues = [int(hue) for hue in re.search(r"HUES = \[([\d, ]+)\]", palette)[1].split(",")]
    sheet = sheet_of("slotwise.measure.bench.report", "chart.css")
    assert [int(hue) for hue in re.findall(r"\.h\d+ \{ --hue: (\d+); \}", sheet)] == hues


def test_the_patterns_of_waste_are_hatched_lines():
    root = ElementTree.fromstring(slot_chart.patterns())
    for kind in ("held", "padding"):
        pattern = root.find(f".//pattern[@id='{kind}']")
        assert pattern.find("rect").get("class") == "loss-ground" and pattern.find("path").get("class") == "loss-line"


def seen_by_a_client(changed: dict[str, Any]) -> None:
    """What a comparison of servers knows."""
    changed["mode"] = "server"
    for run in changed["runs"]:
        run |= dict.fromkeys(("steps", "decode_steps", "occupancy", "mean_rows", "max_rows", "preemptions", "waste",
                              "chart", "step_time"))


@pytest.mark.parametrize("change", [
    lambda changed: changed.update(runs=[], sweeps=[]), lambda changed: changed.pop("sweeps"),
    lambda changed: changed.update(runs=changed["runs"][:1]), seen_by_a_client,
    lambda changed: changed.update(environment={}, workload={}),
], ids=["nothing", "no sweeps", "one run", "servers", "no environment"])
def test_parts_that_are_missing_leave_no_hole(change):
    changed = copy.deepcopy(RESULT)
    change(changed)
    page = render(changed)
    assert "None" not in text_of(page) and "How to read this" in page


def test_servers_are_compared_without_slots():
    changed = copy.deepcopy(RESULT)
    seen_by_a_client(changed)
    page = text_of(render(changed))
    assert "Every slot" not in page and "Where the work went" not in page and "Tokens returned over time" in page
    assert "occupancy" not in page.split("Throughput and latency")[0].split("Every run")[1].split("TTFT:")[0]


def test_one_slot_and_no_waste():
    page = text_of(render(example(count=1, slots=1)))
    assert "occupancy 100%" in page


def test_a_measured_comparison_is_drawn(tmp_path):
    comparison = Comparison(queued([3, 40, 7, 12, 5, 9, 31, 2], [4, 9, 2, 30, 5, 5, 8, 1]), {"model": "toy"})
    for contender in contenders(DISCIPLINES, 2):
        comparison.run(contender, stand)
    measured = json.loads(json.dumps(comparison.result()))
    write_report(measured, tmp_path / "report.html")
    charts = Charts((tmp_path / "report.html").read_text("utf-8")).views["steps"]
    assert len(charts) == 5
    static = next(index for index, run in enumerate(measured["runs"]) if run["name"] == "static")
    assert charts[static]["held"] and charts[static]["padding"] and not charts[-1]["held"]


def test_a_result_of_another_version_is_refused():
    with pytest.raises(ValueError, match="version 1, not 2"):
        render(RESULT | {"version": 2})
