"""Tables of what was measured of mixtures of experts."""

from __future__ import annotations

from docs.generate.markdown import table
from docs.generate.results import Row, load

STREAMS = {"one": 1, "eight": 8, "thirty_two": 32}


def steps() -> str:
    """Returns decode steps of a mixture, and their shares of the bound that the bytes of experts hit set."""
    return table((
        "weights", "rows>", "experts hit, of a layer>", "read, MB>", "at GB/s>", "step, ms>", "bound, ms>", "share>"), [
        (run["dtype"] if run["quantization"] == "none" else run["quantization"], str(row["rows"]),
         f"{row['experts_hit']:.0f}", f"{row['bytes'] / 1e6:,.0f}", f"{row['bytes_per_second'] / 1e9:.0f}",
         f"{row['step_ms']:.1f}", f"{row['bound_ms']:.1f}", f"{row['share']:.0%}")
        for run in load("experts-cpu")["runs"] for row in run["rows"]])


def beside_llamacpp() -> str:
    """Returns output tokens per second over HTTP, here and by llama.cpp, measured one after the other."""
    runs = load("experts-beside-llamacpp-cpu")["runs"]
    return table(("weights here, there", "streams>", "Slotwise>", "llama.cpp>", "ratio>"), [
        (f"{_weights(ours)}, {_weights(theirs)}", str(streams), f"{ours[name]:,.0f}", f"{theirs[name]:,.0f}",
         f"{ours[name] / theirs[name]:.2f}×")
        for ours, theirs in zip(runs[::2], runs[1::2], strict=True) for name, streams in STREAMS.items()])


def _weights(run: Row) -> str:
    """Returns the type of a run's weights: what they were quantized to, or what its file is named after."""
    stem, _, end = run["file"].rpartition(".")
    return run["quantization"] if run["quantization"] != "none" else (
        stem.rpartition("-")[2] if end == "gguf" else "bfloat16")
