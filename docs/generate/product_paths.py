"""Tables of products by every path of a processor, and of decode steps (`benchmarks/results/product-paths*.json`)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from docs.generate.markdown import code, table
from docs.generate.results import load


def product_paths() -> str:
    """Returns the figures of a processor with AVX-512 BF16."""
    return _product_paths("product-paths-cpu")


def product_paths_with_amx() -> str:
    """Returns the figures of a processor with AMX."""
    return _product_paths("product-paths-amx-cpu")


def _product_paths(name: str) -> str:
    """The time of a layer's products on each path, then of decode steps on another path and on the used one."""
    measured = load(name)
    products, steps = measured["products"], measured["steps"]
    counts: Sequence[int] = products["rows"]
    rows: list[tuple[str, ...]] = [
        (code(path), "µs a layer", *_by_rows(counts, counts, values))
        for path, values in products["microseconds"].items()]
    for when in ("before", "after"):
        medians = [median(step) for step in zip(*steps[f"{when}_ms"], strict=True)]
        path = steps[when]["path"]
        words = f"with {code(path)}" if path in products["microseconds"] else "before"
        rows.append((f"decode step {words}", "ms", *_by_rows(counts, steps["rows"], medians)))
    return table(("path", "", *(f"{count} rows>" if count > 1 else "1 row>" for count in counts)), rows)


def _by_rows(shown: Sequence[int], counts: Sequence[int], values: Sequence[float]) -> list[str]:
    """One cell for each of the numbers of rows `shown`."""
    found = dict(zip(counts, values, strict=True))
    cells = [found.get(count) for count in shown]
    return ["–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in cells]
