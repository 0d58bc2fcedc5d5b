"""Orders of eviction on three kinds of traffic, simulated (`benchmarks/results/eviction-simulated.json`).

And what-ifs beside real servers (`eviction-agreement-cpu.json` there).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from docs.generate.markdown import table
from docs.generate.results import load

from slotwise.core.scheduler_limits import EVICTION_POLICIES
from slotwise.measure.simulate.eviction_replay import HINDSIGHT

ORDERS = (*EVICTION_POLICIES, HINDSIGHT)
FIGURES = {"ttft_mean": "first token, mean", "ttft_p99": "first token, p99", "session_mean": "a session, mean",
           "session_p99": "a session, p99"}


def _rows() -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yields the first cells of each row, and its figures by order."""
    for row in load("eviction-simulated")["rows"]:
        yield (row["traffic"], str(row["seed"]) if row["traffic"] != "conversations" else "–",
               f"{row['share']:.1%}", f"{row['requests']:,}"), row["found"]


HEADS = ("traffic", "seed>", "cache>", "requests>")


def found() -> str:
    """Returns the share of prompt tokens found under each order, and what `lru` computes beyond the bound."""
    return table((*HEADS, *(f"{name}>" for name in ORDERS), "computed, lru over hindsight>"), [
        (*cells, *(f"{one[name]['found_share']:.1%}" for name in ORDERS),
         f"{one['lru']['computed'] / one[HINDSIGHT]['computed']:.2f}") for cells, one in _rows()])


def times() -> str:
    """Returns first tokens and session times under each order, compared with `lru`."""
    return table((*HEADS[:3], "", *(f"{name}>" for name in EVICTION_POLICIES)), [
        (*cells[:3], words, f"{one['lru'][figure]:,.2f} s",
         *(f"{one[name][figure] / one['lru'][figure]:.2f}×" for name in EVICTION_POLICIES[1:]))
        for cells, one in _rows() for figure, words in FIGURES.items()])


COMPARED = {"found": "prompt tokens found", "ttft_mean": "first token, mean", "ttft_p50": "first token, p50",
            "ttft_p99": "first token, p99"}
PAIRS = (("without", "with"), ("with", "without"))


def agreement() -> str:
    """Returns what each of two servers said of the other, beside what that measured; means of repeats."""
    together: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in load("eviction-agreement-cpu")["rows"]:
        together.setdefault((row["traffic"], row["seed"]), []).append(row)
    rows = []
    for (traffic, seed), repeats in together.items():
        for figure, words in COMPARED.items():
            measured = {name: [row[name]["what_if"]["measured"][figure] for row in repeats] for name, _ in PAIRS}
            said = {other: [row[name]["what_if"]["what_if"][figure] for row in repeats] for name, other in PAIRS}
            spread = max((max(runs) - min(runs)) / fmean(runs) for runs in measured.values())
            cells = [cell for name in measured for cell in (
                _figure(figure, fmean(measured[name])), _figure(figure, fmean(said[name])),
                f"{fmean(said[name]) / fmean(measured[name]) - 1:+.1%}")]
            rows.append((traffic, str(seed), words, *cells, f"{spread:.1%}" if len(repeats) > 1 else "–"))
    return table(("traffic", "seed>", "", "without, measured>", "what-if>", "error>", "with, measured>", "what-if>",
                  "error>", "spread of repeats>"), rows)


def _figure(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "found" else f"{1000 * value:,.0f} ms"
