"""The runs of benchmarks/policies, short, on a virtual clock."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # `benchmarks` is run from the root and never installed

from benchmarks.policies import charts
from benchmarks.policies.runs import FAILURES, FCFS, RUNS, Where
from benchmarks.policies.worlds import bursty, simulated

SHORT = Where(simulated, None, 1.0, ("bursty",))


@pytest.mark.parametrize("name", ["giants", "tiers", "goodput", "shortest", "fair", "inversion", "gaming"])
def test_a_run_ends_with_figures_and_curves_that_can_be_drawn(name):
    for found in (RUNS | FAILURES)[name](Where(simulated, None, 3.0, ("bursty",)) if name == "giants" else SHORT):
        assert all(value >= 0 for value in found.figures.values())
        assert all(found.curves.values()) and len(found.curves) > 1
        picture = ElementTree.fromstring(charts.chart(found.promise, "seconds", found.curves))
        assert len([part for part in picture if part.tag.endswith("path")]) == len(found.curves)


def test_a_virtual_clock_serves_everyone_and_slower_when_there_is_more():
    few, many = bursty(60, 20.0, 1), bursty(60, 400.0, 1)
    spread, crowded = (simulated(asks, FCFS, 1) for asks in (few, many))
    assert [outcome.num_output for outcome in spread] == [ask.num_output for ask in few]
    assert sum(outcome.ttft for outcome in spread) < sum(outcome.ttft for outcome in crowded)
