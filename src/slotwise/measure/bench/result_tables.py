"""Results of `slotwise bench` as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slotwise.platform.terminal import plain

LATENCIES = {
    "ttft": "time to first token", "tpot": "time per output token", "itl": "between events of a stream",
    "max_itl": "longest gap of a request", "e2el": "end to end"}
COLUMNS = {"mean": "mean", "std": "std", "median": "p50", "p90": "p90", "p99": "p99"}
MAX_ERRORS = 3  # kinds of errors in the table


def serving_table(result: Mapping[str, Any]) -> RenderableType:
    """The output of `bench serve`."""
    facts = [
        ("requests", _counts(result)), ("duration", f"{result['duration']:.2f} s"),
        ("tokens", f"{result['total_input_tokens']:,} in, {result['total_output_tokens']:,} out"),
        ("output", f"{result['output_throughput']:,.1f} tok/s"),
        ("input and output", f"{result['total_token_throughput']:,.1f} tok/s"),
        ("completed", f"{result['request_throughput']:.3f} requests/s"),
    ]
    if result["request_goodput"] is not None:
        within = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in result["goodput"].items())
        facts.append(("goodput", f"{result['request_goodput']:.3f} requests/s within {within}"))
    facts += [("most at once", str(result["max_concurrent_requests"])),
              ("latest sent", f"{result['max_late_ms']:.1f} ms late")]
    parts: list[RenderableType] = [_facts(_title(result, "bench serve"), facts)]
    if result["completed"]:
        parts.append(_latencies(result))
    return Group(*parts, *_errors(result["errors"]))


def throughput_table(result: Mapping[str, Any]) -> RenderableType:
    facts = [
        ("requests", f"{result['completed']} of {result['num_requests']}"),
        ("elapsed", f"{result['elapsed_time']:.2f} s in {result['steps']} steps"),
        ("tokens", f"{result['total_input_tokens']:,} in, {result['total_output_tokens']:,} out"),
        ("output", f"{result['output_tokens_per_second']:,.1f} tok/s"),
        ("input and output", f"{result['tokens_per_second']:,.1f} tok/s"),
        ("completed", f"{result['requests_per_second']:.3f} requests/s"),
        ("rows of a step", f"{result['mean_rows']:.1f} on average, {result['occupancy']:.0%} of the slots"),
    ]
    if drafts := result.get("draft_tokens"):
        right = result["accepted_draft_tokens"]
        facts.append(("drafts", f"{right:,} of {drafts:,} right, {right / drafts:.0%}"))
    return _facts(_title(result, "bench throughput"), facts)


def latency_table(result: Mapping[str, Any]) -> RenderableType:
    facts = [
        ("batch", f"{result['batch_size']} × ({result['input_len']} in, {result['output_len']} out)"),
        ("iterations", str(len(result["latencies"]))), ("average", f"{result['avg_latency'] * 1000:.1f} ms")]
    facts += [(f"p{percent}", f"{seconds * 1000:.1f} ms") for percent, seconds in result["percentiles"].items()]
    return _facts(_title(result, "bench latency"), facts)


def steps_table(result: Mapping[str, Any]) -> RenderableType:
    facts = [
        ("steps", f"{result['steps']:,} in {result['seconds']:.1f} s"),
        *((f"decode, {rows} rows of 256 tokens", f"{taken:.2f} ms") for rows, taken in result["decode_ms"].items()),
        *((f"prompt of {tokens} tokens", f"{taken:.2f} ms") for tokens, taken in result["prompt_ms"].items()),
        ("between two steps", f"{result['pause_ms']:.3f} ms"),
        ("error of predictions", f"{result['median_error']:.1%}, the median of the last steps")]
    return _facts(_title(result, "bench steps"), facts)


def roofline_table(result: Mapping[str, Any]) -> RenderableType:
    """Achieved share of the machine's limits by kind of step, and where a run's time goes."""
    machine = result["machine"]
    title = plain(f"bench throughput --roofline: {result.get('model', '')}, {result['seconds']:.1f} s; reads at "
             f"{machine['bytes_per_second'] / 1e9:.1f} GB/s, {result['product_path']} products at "
             f"{machine['operations_per_second'] / 1e9:,.0f} GFLOP/s")
    steps = _table(title, ("steps", "number", "tokens", "seconds", "bytes alone", "operations alone", "achieved"))
    for kind, tally in result["kinds"].items():
        if tally["steps"]:
            steps.add_row(kind, f"{tally['steps']:,}", f"{tally['tokens']:,}", f"{tally['seconds']:.2f}",
                          f"{tally['bytes_seconds']:.2f}", f"{tally['operations_seconds']:.2f}",
                          f"{tally['achieved']:.0%}")
    parts = _table(f"\nwhere it goes, kernel by kernel ({result['timed_seconds']:.1f} s)", ("", "", ""))
    for name, seconds in result["parts"].items():
        parts.add_row(name, f"{seconds:.2f} s", f"{seconds / sum(result['parts'].values()):.0%}")
    return Group(steps, parts)


def kernels_table(result: Mapping[str, Any]) -> RenderableType:
    """A line for each path with its microseconds, then why other paths cannot run."""
    weights = "bfloat16" if result["quantization"] == "none" else result["quantization"]
    table = _table(f"bench kernels: products of {weights}, microseconds a layer",
                   ("path", *(f"{count} rows" if count > 1 else "1 row" for count in result["rows"]), ""))
    for path, taken in result["microseconds"].items():
        marks = [mark for mark in ("used", "fastest") if result[mark] == path]
        table.add_row(path, *(f"{microseconds:,.0f}" for microseconds in taken.values()), ", ".join(marks))
    return Group(table, *(plain(f"{path}: {why}") for path, why in result["obstacles"].items()))


def _title(result: Mapping[str, Any], command: str) -> Text:
    model = result.get("model_id") or result.get("model", "")
    return plain(f"{command}: {model}" + (" (interrupted)" if result["status"] == "interrupted" else ""))


def _table(title: Text | str, heads: Sequence[str]) -> Table:
    """A table of numbers, with names in the first column."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=any(heads))
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", style="" if number else "dim")
    return table


def _facts(title: Text, facts: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in facts:
        table.add_row(name, value)
    return table


def _counts(result: Mapping[str, Any]) -> str:
    """The number of requests by status."""
    others = [f"{result[status]} {status}" for status in ("rejected", "failed", "unfinished") if result[status]]
    return ", ".join([f"{result['completed']} of {result['num_prompts']} completed", *others])


def _latencies(result: Mapping[str, Any]) -> Table:
    table = _table("\nmilliseconds", ("", *COLUMNS.values()))
    for name, words in LATENCIES.items():
        table.add_row(words, *(f"{result[f'{column}_{name}_ms']:,.1f}" for column in COLUMNS))
    return table


def _errors(errors: Iterable[str]) -> list[Text]:
    """The commonest errors, with their counts."""
    found = Counter(filter(None, errors)).most_common(MAX_ERRORS)
    return [plain(f"{count} × {error}", "red") for error, count in found]
