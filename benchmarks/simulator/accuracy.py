"""Predicted beside measured: a real server over HTTP, and the simulator fed by the log of other windows.

    warm-up   fitted  a  b  c   fitted  a  b  c   fitted  a  b  c      windows, one after the other
              │       │         │                 │
              └───────┼─────────┴─────────────────┴──► event log ──► measure.simulate ──► predicted figures of a, b, c
                      └──► measured figures of a in each round, and their spread

The machine's own speed drifts by tens of percent within minutes, so each round fits a window of its own: held-out
windows are predicted from other requests of the same minutes.  Lengths are those of a trace, scaled, unless a case says
otherwise.  Each round has prompts of its own, so that none finds those of another in the prefix cache.  Measured times
are the client's; to predicted ones is added what the fitted log shows, as medians, between the first byte and the
engine, and between the engine and the first byte sent.

usage: python -m benchmarks.simulator accuracy MODEL --trace CSV --json FILE [--keep FOLDER]   (nothing else may run)
       python -m benchmarks.simulator accuracy --again FOLDER --json FILE        (predicts anew what --keep has kept)

With five rounds, seven minutes for `--cases conversations`, and nine for the other four.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from benchmarks.commands import bar, parser_of
from benchmarks.server import serving

from slotwise.core.scheduler_limits import SLO
from slotwise.engine.messages import Add, Command
from slotwise.measure.bench.load_generator import BenchTarget, Phrasing, measure, resolve
from slotwise.measure.bench.measures import COMPLETED, RequestOutcome
from slotwise.measure.bench.results import environment, write_json
from slotwise.measure.simulate.figures import Figures, SimulatedRequest, figures
from slotwise.measure.simulate.pace import LearnedPace
from slotwise.measure.simulate.recorded import read_recording
from slotwise.measure.simulate.simulator import Server, Setup, simulate, traffic_of
from slotwise.measure.workload.distributions import Arrivals, Gamma, LogNormal, Poisson, Prefixes
from slotwise.measure.workload.trace import read_trace, replay
from slotwise.measure.workload.workloads import NO_PREFIX, Recipe, Workload, generate
from slotwise.observe.log_file import read

COMPARED = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "output_throughput")
FIRST_SEED, WARM_SEED, FIT_SEED = 2, 90, 50  # windows of different seeds are of different requests
WARMING = 0.5  # windows' worth of requests before the first one: the first seconds of a server are slower
SETTLED = 0.5  # seconds after which the event log of a window is written
KEYS = ("first", "second")  # of the two tenants; the first one has all requests of the other cases
PREDICTIONS = 15  # simulated runs of a window
KEPT = "measured.json"  # in the folder of --keep, beside the event log
BURSTS = 3.0  # deviation of the gaps between arrivals, over their mean
PREFIX = Prefixes(4, 96)
# Code is completed from long prompts by few tokens: medians near those published for the Azure code trace of 2023
# (Splitwise, Patel et al., ISCA 2024), before the scale.
CODE = (1500.0, 13.0)
TENANT = 1_000_000  # ids of one tenant's requests


class Case(NamedTuple):
    """A held-out window: the requests of each tenant."""

    name: str
    rate: float  # requests a second, of all tenants
    tenants: tuple[Workload, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(workload.requests) for workload in self.tenants)

    def repeated(self, number: int) -> Case:
        """Returns the window with other prompts of the same lengths."""
        return self._replace(tenants=tuple([
            replace(workload, seed=workload.seed + 1000 * number) for workload in self.tenants]))


class Windows(NamedTuple):
    """Cuts windows out of a trace."""

    trace: Path
    scale: float
    seconds: float

    def of_trace(self, arrivals: Arrivals, rate: float, seed: int, prefixes: Prefixes = NO_PREFIX) -> Workload:
        """Returns requests of the trace, different ones for each seed, that arrive at `rate` a second."""
        count = max(1, round(rate * self.seconds))
        read = read_trace(self.trace, self.scale, limit=(seed + 1) * count)
        part = type(read)(read.name, read.times[-count:], read.lengths[-count:], self.scale)
        return replay(part, arrivals, prefixes=prefixes, seed=seed)

    def conversations(self, rate: float, seed: int) -> Workload:
        return self.of_trace(Poisson(rate), rate, seed)

    def code(self, rate: float, seed: int) -> Workload:
        prompt, output = (max(1.0, tokens * self.scale) for tokens in CODE)
        return generate(Recipe(
            max(1, round(rate * self.seconds)), LogNormal(prompt, 0.6, 900), LogNormal(output, 0.8, 100),
            Poisson(rate)), seed)

    def cases(self, rates: Sequence[float]) -> list[Case]:
        """Returns conversations at each rate, and the other cases at the middle one."""
        middle = sorted(rates)[len(rates) // 2]
        seeds = iter(range(FIRST_SEED, 40))
        found = [Case("conversations", rate, (self.conversations(rate, next(seeds)),)) for rate in rates]
        bursts = self.of_trace(Gamma(middle, BURSTS), middle, next(seeds))
        prefixes = self.of_trace(Poisson(middle), middle, next(seeds), PREFIX)
        code = self.code(middle, next(seeds))
        tenants = (self.conversations(middle / 2, next(seeds)), self.code(middle / 2, next(seeds)))
        return [*found, Case("bursts", middle, (bursts,)), Case("prefixes", middle, (prefixes,)),
                Case("code", middle, (code,)), Case("two tenants", middle, tenants)]


# -- measured ----------------------------------------------------------------------------------------------------------


def seen(found: Sequence[RequestOutcome]) -> tuple[Figures, float]:
    """Returns the figures of what clients measured, and the tokens of an event.

    Gaps are those between events: where the server writes two tokens at once, a gap spans both.
    """
    failed = [outcome for outcome in found if outcome.status != COMPLETED]
    if failed:
        raise RuntimeError(f"{len(failed)} requests were not served: {failed[0].error}")
    of_all = figures([SimulatedRequest.measured(one.sent, one.token_times, one.ended, "length") for one in found])
    of_event = sum(one.num_output for one in found) / sum(len(one.token_times) for one in found)
    return replace(of_all, output_throughput=of_all.output_throughput * of_event), of_event


def outcomes(target: BenchTarget, vocab_size: int, case: Case) -> list[RequestOutcome]:
    """Sends the requests of all tenants at once, each with its key."""
    def run(key: str, workload: Workload) -> list[RequestOutcome]:
        phrasing = Phrasing(vocab_size, hidden_lengths=True)
        return measure(replace(target, api_key=key), workload, phrasing, num_warmups=2).outcomes

    with ThreadPoolExecutor(len(case.tenants)) as pool:
        return [one for found in pool.map(run, KEYS, case.tenants) for one in found]


# -- predicted ---------------------------------------------------------------------------------------------------------


def traffic(case: Case, handling: float) -> list[tuple[float, Command]]:
    """Returns the commands as they reach the engine, `handling` seconds after they were sent."""
    found: list[tuple[float, Command]] = []
    for tenant, (key, workload) in enumerate(zip(KEYS, case.tenants, strict=False)):
        found += [(at + handling, Add(tenant * TENANT + add.request_id, replace(add.spec, slo=SLO(key))))
                  for at, add in traffic_of(workload)]
    return sorted(found, key=lambda one: one[0])


def predicted(case: Case, setup: Setup, handling: float, seed: int) -> Figures:
    """Returns the figures of a run in which steps vary as `seed` says."""
    assert isinstance(setup.pace, LearnedPace)
    setup = replace(setup, pace=replace(setup.pace, seed=seed))
    requests = simulate(traffic(case, handling), [Server(setup)]).values()
    return figures([replace(request, arrived=request.arrived - handling) for request in requests])


def compared(guesses: Sequence[Figures], runs: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Returns each figure predicted and measured, medians of runs, its error, and the measured spread; relative."""
    table = {}
    for name in COMPARED:
        values = [getattr(run, name) for run in runs]
        middle, guess = statistics.median(values), statistics.median(getattr(one, name) for one in guesses)
        table[name] = {"predicted": guess, "measured": middle, "error": guess / middle - 1,
                       "spread": (max(values) - min(values)) / middle}
    return table


class Raw(msgspec.Struct):
    """Everything that was measured, from which figures are predicted and compared."""

    environment: dict[str, Any]
    trace: str
    scale: float
    seconds: float
    rates: list[float]
    cases: list[str]
    fits: list[tuple[int, int]] = []  # bytes of the event log
    runs: list[list[list[RequestOutcome]]] = []  # by round and case


def measured(asked: argparse.Namespace, folder: Path) -> None:
    """Serves all windows, and keeps the event log in `folder`."""
    windows = Windows(asked.trace, asked.scale, asked.seconds)
    cases = [case for case in windows.cases(asked.rates) if case.name in asked.cases]
    raw = Raw(environment(), str(asked.trace), asked.scale, asked.seconds, asked.rates, [one.name for one in cases])
    keys = [word for key in KEYS for word in ("--api-key", key)]
    log, rate = folder / "log", asked.rates[-1]
    warming = windows._replace(seconds=asked.seconds * WARMING)
    with serving(asked.model, "--event-log", str(log), "--speculative-config", '{"method": "none"}', *keys) as server:
        target, vocab_size = resolve(BenchTarget(server.url, api_key=KEYS[0]))
        outcomes(target, vocab_size, Case("warm-up", rate, (warming.conversations(rate, WARM_SEED),)))
        for number in bar(range(asked.repeats), "rounds"):
            begin = _written(log)
            rate = asked.rates[-1 - number % len(asked.rates)]
            outcomes(target, vocab_size, Case("fitted", rate, (windows.conversations(rate, FIT_SEED + number),)))
            raw.fits.append((begin, _written(log)))
            raw.runs.append([outcomes(target, vocab_size, case.repeated(number)) for case in cases])
            (folder / KEPT).write_bytes(msgspec.json.encode(raw))  # rounds that an interrupt does not take away


def _written(log: Path) -> int:
    """Returns the bytes of an event log, once nothing is left to be written."""
    time.sleep(SETTLED)
    return log.stat().st_size


def judged(folder: Path) -> dict[str, Any]:
    """Predicts the windows of each case from the fitted ones.  Returns the predicted beside the measured figures."""
    raw = msgspec.json.decode((folder / KEPT).read_bytes(), type=Raw)
    windows = Windows(Path(raw.trace), raw.scale, raw.seconds)
    cases = [case for case in windows.cases(raw.rates) if case.name in raw.cases]
    text = (folder / "log").read_bytes()
    lines = [text[: text.index(b"\n") + 1], *(text[begin:end] for begin, end in raw.fits)]
    setup, recording = read_recording(read(b"".join(lines).splitlines(keepends=True)))
    rows = []
    for place, case in enumerate(cases):
        runs = [seen(each[place]) for each in raw.runs]
        guesses = [predicted(case, setup, recording.handling, seed) for seed in range(PREDICTIONS)]
        rows.append({
            "case": case.name, "rate": case.rate, "seed": case.tenants[0].seed, "requests": case.num_requests,
            "seconds": raw.seconds, "repeats": len(raw.runs),
            "tokens_per_event": statistics.median(of_event for _, of_event in runs),
            "figures": compared(guesses, [found for found, _ in runs])})
    return {
        "version": 3, "environment": raw.environment, "trace": Path(raw.trace).name, "length_scale": raw.scale,
        "pause_ms": setup.pace.between() * 1e3, "handling_ms": recording.handling * 1e3, "windows": rows}


def run(asked: argparse.Namespace) -> dict[str, Any]:
    if asked.again:
        found = [judged(folder) for folder in asked.again]
        return found[0] | {"windows": [window for one in found for window in one["windows"]]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        measured(asked, folder)
        return judged(folder)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint's folder")
    parser.add_argument("--trace", type=Path, help="the Azure conversation trace, or another CSV")
    parser.add_argument("--scale", type=float, default=0.125, help="factor of the trace's lengths")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 6.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=22.0, help="of a window")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    names = ("conversations", "bursts", "prefixes", "code", "two tenants")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE",
                        help=f"which of {', '.join(names)}")
    parser.add_argument("--json", required=True, help="write the figures here")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the event log and what clients measured here")
    parser.add_argument("--again", type=Path, nargs="+", metavar="FOLDER", help="measure nothing: predict anew what is "
                        "kept there")
    asked = parser.parse_args()
    if not asked.again and not (asked.model and asked.trace):
        parser.error("MODEL and --trace are needed, but with --again")
    result = run(asked)
    write_json(asked.json, result)
    for one in result["windows"]:
        print(f"{one['case']}, {one['rate']:g} requests/s, seed {one['seed']}, {one['requests']} requests")
        for name, row in one["figures"].items():
            print(f"  {name:18} predicted {row['predicted']:9.4f}  measured {row['measured']:9.4f}  "
                  f"error {row['error']:+7.1%}  spread {row['spread']:6.1%}")
