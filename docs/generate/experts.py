"""Tables of what was measured of mixtures of experts."""

from __future__ import annotations

from docs.generate.markdown import table
from docs.generate.results import load


def steps() -> str:
    """Returns decode steps of a mixture, and their shares of the bound that the bytes of experts hit set."""
    return table((
        "weights", "rows>", "experts hit, of a layer>", "read, MB>", "at GB/s>", "step, ms>", "bound, ms>", "share>",
        "commit"), [
        (run["dtype"] if run["quantization"] == "none" else run["quantization"], str(row["rows"]),
         f"{row['experts_hit']:.0f}", f"{row['bytes'] / 1e6:,.0f}", f"{row['bytes_per_second'] / 1e9:.0f}",
         f"{row['step_ms']:.1f}", f"{row['bound_ms']:.1f}", f"{row['share']:.0%}", run["environment"]["commit"][:7])
        for run in load("experts-cpu")["runs"] for row in run["rows"]])
