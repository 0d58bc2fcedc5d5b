"""The story of the simulator's page, from `benchmarks/results/slow-afternoon-cpu.json`."""

from __future__ import annotations

from typing import Any

from docs.generate.markdown import table
from docs.generate.results import load

FIGURES = {
    "ttft_p50": "first token, p50, ms", "ttft_p99": "first token, p99, ms", "itl_p50": "between tokens, p50, ms",
    "itl_p99": "between tokens, p99, ms", "goodput": "requests/s within the objective"}


def slow_afternoon() -> str:
    """Returns what was measured, explained, foreseen and measured again."""
    found = load("slow-afternoon-cpu")
    runs = found["what_if"][found["policy"]]
    columns = [runs["measured"], runs["replayed"], runs["what_if"], found["after"]]
    rows = [(words, *(f"{run[name] * (1 if name == 'goodput' else 1e3):,.1f}" for run in columns))
            for name, words in FIGURES.items()]
    heads = ("", "measured>", "replayed>", f"replayed under {found['policy']}>", "the afternoon after, measured>")
    return f"{_explained(found)}\n\n{table(heads, rows)}"


def _explained(found: dict[str, Any]) -> str:
    """The explanation of one request, and its counterfactual."""
    one, first = found["explained"], found["counterfactual"]
    parts = sorted(one["parts"], key=lambda part: -float(part["ms"]))[:3]
    named = ", ".join(
        f"{part['ms']:,.0f} ms of {part['part'].replace('_', ' ')}"
        + (f" ({part['reason'].replace('_', ' ')})" if part["reason"] else "") for part in parts)
    return (f"{found['requests']} requests came, {found['rate']:.1f} a second, to {found['slots']} slots; the first "
            f"token was to come within {found['objective_s']:g} s. Of one that waited long, `explain` says: "
            f"{one['total_ms']:,.0f} ms, of them {named}. Had it arrived under `{found['policy']}`: its first token "
            f"after {first['what_if']['first_token']:.2f} s instead of {first['measured']['first_token']:.2f} s.")
