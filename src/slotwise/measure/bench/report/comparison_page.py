"""The page of a comparison: one HTML file with its pictures, style and script inside; nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import cycle
from os import PathLike
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from slotwise.measure.bench.report import plots, slot_chart, words
from slotwise.measure.bench.report.data import DisciplineRun, Result, read
from slotwise.measure.bench.report.plots import fitted, percent, tag
from slotwise.measure.bench.report.tables import runs_table, waste_table
from slotwise.measure.bench.report.words import batching, capital, count, figure, reference, seconds, share, subject
from slotwise.platform.files import write_output

PICTURE_WIDTH = 1000  # pixels, of a chart in a file of its own
NAMED_COLORS = {"continuous": "c0", "static": "c1", "orca": "c2", "dynamic": "c3", "one_at_a_time": "c4"}
SLOT_PARTS = {"useful": "a useful token", **{kind: slot_chart.KINDS[kind] for kind in ("held", "empty", "idle")}}
TOKEN_PARTS = {"prefill": "prompt tokens", "decode": "output tokens",
               **{kind: slot_chart.KINDS[kind] for kind in ("padding", "held")}}

Parts = list[tuple[str, float | None]]
"""Styles and sizes of a bar's parts."""


def context(result: Result) -> dict[str, Any]:
    """The template's variables."""
    who, finding = words.headline(result)
    runs = result.runs
    shown = {"result": result, "who": who, "finding": finding, "conditions": words.conditions(result), "runs": runs,
             "facts": facts(result), "fit_warning": words.fit_warning(runs), "patterns": slot_chart.patterns(),
             "sweeps": _sweeps(result)}
    if runs:
        colors = colors_of(runs)
        shown |= {"table_of_runs": runs_table(runs), "charts": charts_of(runs), "speed": _speed(runs, colors),
                  "curves": _curves(runs, colors), "waste": _waste(result)}
    return shown


def colors_of(runs: Sequence[DisciplineRun]) -> list[str]:
    """A color for each run: its discipline's own, or the next unused one."""
    free = cycle(f"c{number}" for number in range(len(NAMED_COLORS), plots.COLORS))
    seen: set[str] = set()
    colors = []
    for run in runs:
        named = NAMED_COLORS.get(run.name)
        colors.append(named if named and named not in seen else next(free))
        seen.add(colors[-1])
    return colors


def facts(result: Result) -> list[tuple[str, str]]:
    """What was compared, as terms and their values; unknown ones are left out."""
    environment, workload = result.environment, result.workload
    machine = (environment.get("machine"), f"{cores} cores" if (cores := environment.get("cores")) else "")
    versions = (f"{name} {environment[name]}" for name in ("slotwise", "python", "torch") if environment.get(name))
    requests = f"{workload.num_requests:,} requests" if workload.num_requests else ""
    terms = (f"{key.replace('_', ' ')} {value}" for key, value in workload.description.items())
    listed = (
        ("Model", (result.model, result.dtype)), ("Workload", (requests, *terms)),
        ("Seed", ("" if result.seed is None else str(result.seed),)), ("Machine", machine), ("Versions", versions),
        ("Commit", (environment.get("commit"),)), ("Measured", (words.moment(environment.get("created", "")),)))
    joined = [(term, ", ".join(filter(None, values))) for term, values in listed]
    return [(term, text) for term, text in joined if text]


def charts_of(runs: Sequence[DisciplineRun]) -> dict[str, Any]:
    """The slot x step charts, against seconds and against steps, each on one scale for all."""
    drawn = [run for run in runs if run.lanes.steps]
    if not drawn:
        return {}
    by_seconds = [run.lanes.ends for run in drawn]
    by_steps = [tuple(map(float, range(run.lanes.steps + 1))) for run in drawn]
    views = {}
    for name, every, text in (("seconds", by_seconds, words.tick_seconds), ("steps", by_steps, words.tick)):
        longest = max(edges[-1] for edges in every)
        shortest = min(edges[-1] for edges in every)
        axis = fitted(name, longest, text, most=10)
        wider = slot_chart.zoom(axis, shortest)
        axis = fitted(name, longest, text, most=round(10 * wider))
        views[name] = {"width": percent(wider), "runs": [
            {"label": capital(run.label), "note": _chart_note(run), "height": slot_chart.height_of(run.lanes),
             "picture": slot_chart.draw(
                 run.lanes, edges, axis, wider, (_chart_title(run, name), _finish(run, name)))}
            for run, edges in zip(drawn, every, strict=True)]}
    kinds = {span.kind for run in drawn for span in slot_chart.with_idle(run.lanes.spans)}
    kinds |= {"padding"} if any(run.lanes.pads for run in drawn) else set()
    kinds |= {"empty", "prefill", "decode"}
    return {"views": views, "legend": slot_chart.legend(kind for kind in slot_chart.KINDS if kind in kinds)}


def _finish(run: DisciplineRun, unit: str) -> str:
    """The text at a chart's end: its own end, or that of the run if the chart is truncated."""
    lanes_end, steps = (run.seconds, run.steps) if run.lanes.truncated else (run.lanes.ends[-1], run.lanes.steps)
    text = seconds(lanes_end) if unit == "seconds" else f"{count(steps)} steps"
    return f"… {text}" if run.lanes.truncated else text


def _chart_title(run: DisciplineRun, unit: str) -> str:
    return (f"{capital(run.label)}: {run.lanes.slots} slots over {run.lanes.steps:,} steps, "
            f"{seconds(run.lanes.ends[-1])}, drawn against {unit}")


def _chart_note(run: DisciplineRun) -> str:
    parts = [f"{seconds(run.seconds)}", f"{count(run.steps)} steps",
             f"occupancy {share(run.occupancy)}"]
    if run.step_time:
        error = run.step_time.error
        within = f" (within {share(abs(error))})" if error is not None else ""
        sign, each = ("−", -run.step_time.b) if run.step_time.b < 0 else ("+", run.step_time.b)
        parts.append(f"a step takes {seconds(run.step_time.a)} {sign} {seconds(each)} a row{within}")
    if run.lanes.truncated:
        parts.append(f"drawn: the first {count(run.lanes.steps)} steps")
    return " · ".join(parts)


def _speed(runs: Sequence[DisciplineRun], colors: Sequence[str]) -> list[tuple[str, str, Markup]]:
    """A panel of bars for each measure: its title, how to read it, its picture."""
    base = reference(tuple(runs))
    gains = [words.median(words.faster(run, base)) for run in runs]
    throughput = [
        plots.BarRow(run.label, [(f"fill {color}", run.output_throughput)], " · ".join(filter(None, (
            f"{figure(run.output_throughput)} tok/s", words.times(gain) if gain and len(runs) > 1 else ""))))
        for run, color, gain in zip(runs, colors, gains, strict=True)]
    panels = [("Output tokens per second", "longer is better", throughput)]
    for title, key in (("Time to first token", "ttft"), ("Time between tokens", "itl"), ("Time to last token", "e2e")):
        spreads = [getattr(run, key) for run in runs]
        panels.append((title, "bar: p50, line: to p99; shorter is better", [
            plots.BarRow(run.label, [(f"fill {color}", spread.p50)],
                     "answers come whole" if spread is run.itl and run.whole
                     else f"p50 {seconds(spread.p50)} · p99 {seconds(spread.p99)}", spread.p99)
            for run, color, spread in zip(runs, colors, spreads, strict=True)]))
    return [(title, note, plots.bars(title, rows)) for title, note, rows in panels]


def _curves(runs: Sequence[DisciplineRun], colors: Sequence[str]) -> dict[str, Any]:
    return {
        "legend": plots.legend((run.label, color) for run, color in zip(runs, colors, strict=True)),
        "cumulative": plots.cumulative(runs, colors),
        "whole": _whole(runs),
        "distributions": [(title, note, picture) for title, note, picture in (
            ("Time to first token", "share of requests",
             plots.distribution("Distribution of the time to first token", runs, colors,
                                 lambda run: run.ttft_values)),
            ("Time between tokens", "share of gaps",
             plots.distribution("Distribution of the time between tokens", runs, colors,
                                 lambda run: run.itl_values))) if picture]}


def _whole(runs: Sequence[DisciplineRun]) -> str:
    """A sentence about the runs without time between tokens."""
    names = [run.label for run in runs if run.whole]
    if not names:
        return ""
    return f"{capital(words.listed(names))} gave each answer whole: there is no time between its tokens."


def _waste(result: Result) -> dict[str, Any]:
    """Where slot-steps and computed tokens went, and a sentence about it; empty if it was not measured."""
    table = waste_table(result.runs)
    if not table.rows:
        return {}
    slot_rows = [plots.BarRow(run.label, _slot_parts(run), _slot_text(run)) for run in result.runs]
    token_rows = [plots.BarRow(run.label, _token_parts(run, result.workload.prompt_tokens), "") for run in result.runs]
    token_rows = [row._replace(text=f"{count(row.total)} tokens") for row in token_rows]
    return {"slots": plots.bars("Slot-steps by what they were used for", slot_rows),
            "slot_legend": _part_legend(slot_rows, SLOT_PARTS),
            "tokens": plots.bars("Computed tokens by what they were for", token_rows),
            "token_legend": _part_legend(token_rows, TOKEN_PARTS), "sentence": waste_sentence(result),
            "table": table}


def _slot_parts(run: DisciplineRun) -> Parts:
    total = run.slots * (run.steps or 0)
    useful = (run.occupancy or 0) * total
    held, empty = run.waste.held_row_steps or 0, run.waste.empty_slot_steps or 0
    idle = total - useful - held - empty
    return _parts(useful=useful, held=held, empty=empty, idle=idle if idle > 0.5 else 0)


def _slot_text(run: DisciplineRun) -> str:
    return f"{count(run.slots * (run.steps or 0))} slot-steps · {share(run.occupancy)} wanted"


def _token_parts(run: DisciplineRun, prompt_tokens: float | None) -> Parts:
    return _parts(prefill=prompt_tokens, decode=run.output_tokens, padding=run.waste.padded_tokens,
                  held=run.waste.held_row_steps)


def _parts(**sizes: float | None) -> Parts:
    return [(f"part {kind}", size) for kind, size in sizes.items()]


def _part_legend(rows: Sequence[plots.BarRow], names: dict[str, str]) -> list[tuple[str, str]]:
    present = {style for row in rows for style, size in row.parts if size}
    return [(kind, text) for kind, text in names.items() if f"part {kind}" in present]


def waste_sentence(result: Result) -> str:
    """A sentence about the slot-steps of the first and the reference run."""
    best, base = subject(result.runs), reference(result.runs)
    if best.occupancy is None:
        return ""
    other = "" if best is base or base.occupancy is None else f"; {batching(base)} used {share(base.occupancy)}"
    return (f"{capital(batching(best))} used {share(best.occupancy)} of its slot-steps for a useful token"
            f"{other}.")


def _sweeps(result: Result) -> list[dict[str, Any]]:
    return [{"title": swept.title, "notes": swept.notes, "legend": plots.sweep_legend(swept),
             "picture": plots.sweep(swept)} for swept in result.sweeps if swept.series]


def render(result: Mapping[str, Any]) -> str:
    """The page for a result of `slotwise compare` (version 1), whole or interrupted.

    Raises:
        ValueError: the result is of another version.
    """
    templates = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = templates.from_string(_asset("page.html"))
    return template.render(context(_checked(result)), style=Markup(_asset("page.css") + _asset("chart.css")),
                           script=Markup(_asset("page.js")))


def write_report(result: Mapping[str, Any], path: str | PathLike[str]) -> None:
    """Write the page to `path`."""
    write_output(Path(path), render(result).encode())


def slot_charts(result: Mapping[str, Any]) -> dict[str, str]:
    """The slot x step chart of every run by its label, against seconds on one scale, each a complete SVG file."""
    charts = charts_of(_checked(result).runs)
    drawn = charts["views"]["seconds"]["runs"] if charts else ()
    return {run["label"]: _standing_alone(run["picture"], run["height"]) for run in drawn}


def _standing_alone(picture: Markup, height: int) -> Markup:
    ground = tag("rect", width="100%", height="100%", fill="var(--page)")
    placed = tag("svg", picture, x=30, y=8, width=PICTURE_WIDTH - 126, height=height)  # the style sheet's padding
    return tag("svg", tag("style", Markup(_asset("chart.css"))), slot_chart.patterns(), ground, placed, Markup("\n"),
               xmlns="http://www.w3.org/2000/svg", width=PICTURE_WIDTH, height=height,
               viewBox=f"0 0 {PICTURE_WIDTH} {height}")


def _checked(result: Mapping[str, Any]) -> Result:
    version = result.get("version", 1)
    if version != 1:
        raise ValueError(f"this report reads results of version 1, not {version!r}")
    return read(result)


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text("utf-8")
