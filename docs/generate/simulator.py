"""The tables of the simulator's page, from `benchmarks/results/*.json`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, table
from docs.generate.results import load

FIGURES = {
    "ttft_p50": "first token, p50, ms", "ttft_p99": "first token, p99, ms", "itl_p50": "between tokens, p50, ms",
    "itl_p99": "between tokens, p99, ms", "output_throughput": "output tokens/s"}
NOT_YET = "Not measured yet."
WIDTH = 120  # characters of a line
STORY = {"ttft_p50": "first token, p50", "ttft_p99": "first token, p99", "itl_p99": "between tokens, p99",
         "goodput": "requests within the objective, a second"}


def validation() -> str:
    """Returns what was predicted and measured of each held-out window, with the spread of its repeats."""
    return table(("case", "requests/s", "seed", "figure", "predicted>", "measured, median>", "error>",
                  "spread of repeats>"), [
        (window["case"], f"{window['rate']:g}", str(window["seed"]), FIGURES[name], *(
            f"{row[which] * (1 if name == 'output_throughput' else 1e3):.1f}" for which in ("predicted", "measured")),
         f"{row['error']:+.0%}", f"{row['spread']:.0%}")
        for window in load("simulator-cpu")["windows"] for name, row in window["figures"].items()])


def speed() -> str:
    """Returns how many requests a second of processor time are simulated."""
    return table(("servers>", "arrivals", "steps", "requests>", "rows of a step>", "requests a CPU second>",
                  "memory at most, MiB>"), [
        (str(row["replicas"]), row["arrivals"], "runs at once" if row["at_once"] else "one by one",
         f"{row['requests']:,}", f"{row['tokens'] / row['steps']:.1f}", f"{row['requests_per_cpu_second']:,.0f}",
         f"{row['peak_mib']:,}") for row in load("simulator-speed-cpu")["rows"]])


def _measured(name: str) -> Any:
    """Returns a result; empty if it was not measured yet."""
    return load(name) if (ROOT / "benchmarks" / "results" / f"{name}.json").exists() else {}


def replicas_needed() -> str:
    """Returns for each trial what was foreseen and measured with as many replicas as were needed, and one fewer."""
    if not (found := _measured("capacity-cpu")):
        return NOT_YET
    pairs = [(trial, guess, there) for trial in found["trials"]
             for guess, there in zip(trial["foreseen"], trial.get("measured", ()), strict=False)]
    return table(("requests/s", "seed", "replicas", "first token in time, foreseen>", "measured>",
                  "tokens in time, foreseen>", "measured>", "objective, foreseen and measured"), [
        (f"{trial['rate']:.1f}", str(trial["seed"]), str(there["replicas"]), f"{guess['ttft']:.0%}",
         f"{there['ttft']:.0%}", f"{guess['tpot']:.0%}", f"{there['tpot']:.0%}",
         ", ".join("met" if one["met"] else "missed" for one in (guess, there))) for trial, guess, there in pairs])


def questions() -> str:
    """Returns what each question took, and the gaps of streams with and without it."""
    if not (found := _measured("what-if-cpu")):
        return NOT_YET
    return table(("requests in the ring>", "of seconds>", "answered after, s>", "p99 of the gaps meanwhile, ms>",
                  "without a question>", "ratio>"), [
        (str(pair["with"]["traffic_requests"]), f"{pair['with']['traffic_seconds']:.0f}",
         f"{pair['with']['seconds']:.1f}", *(f"{pair[which]['p99_ms']:.1f}" for which in ("with", "without")),
         f"{pair['with']['p99_ms'] / pair['without']['p99_ms']:.3f}") for pair in found["pairs"]])


def story() -> str:
    """Returns the slow afternoon as measured, replayed and foreseen under other settings, and the one after."""
    if not (found := _measured("slow-afternoon-cpu")):
        return NOT_YET
    answers = found["what_if"]
    first = answers[0]
    columns: list[tuple[str, Mapping[str, float]]] = [
        ("measured", first["measured"]), ("replayed as it was", first["replayed"]),
        *((_settings(one["changes"]), one["what_if"]) for one in answers), ("the afternoon after", found["after"])]
    return table(("", *(f"{name}>" for name, _ in columns)), [
        (words, *(f"{figures[name]:.1f}" if name == "goodput" else _time(figures[name]) for _, figures in columns))
        for name, words in STORY.items()])


def story_facts() -> str:
    """Returns what was sent, how the slow request's time divides, and what the counterfactual said of it."""
    if not (found := _measured("slow-afternoon-cpu")):
        return NOT_YET
    slow, other = found["explained"], found["counterfactual"]
    parts = [f"{one['part'].replace('_', ' ')}{' (' + one['reason'].replace('_', ' ') + ')' if one['reason'] else ''} "
             f"{one['ms']:,.0f} ms" for one in slow["parts"] if one["ms"] >= 1]
    sent = (f"- Sent: {found['requests']} requests at {found['rate']:.1f} a second, to a server of {found['slots']} "
            f"slots of which {found['before']['max_num_seqs']} were in use. Objective: a first token within "
            f"{found['objective_s'] * 1e3:.0f} ms.")
    explained = (f"- {code('slotwise explain')} divides the {slow['total_ms'] / 1e3:.1f} s of a slow request "
                 f"({slow['prompt_tokens']} prompt tokens, {slow['completion_tokens']} of output) into "
                 f"{', '.join(parts)}.")
    asked = (f"- Under {_settings(found['best'])} its first token would have come after "
             f"{_time(other['what_if']['first_token'])}, and not after {_time(other['measured']['first_token'])} "
             f"({_time(other['replayed']['first_token'])} in the replay of what was).")
    return "\n".join(textwrap.fill(one, WIDTH, subsequent_indent="  ") for one in (sent, explained, asked))


def _settings(changes: Mapping[str, Any]) -> str:
    return ", ".join(code(f"{name}={value}") for name, value in changes.items())


def _time(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
