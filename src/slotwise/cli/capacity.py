"""slotwise capacity, slotwise tune: how many replicas a workload needs, and which settings suit it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from slotwise.cli.machine_options import add_machine_options, setup_of_machine
from slotwise.cli.numbers import Number
from slotwise.cli.options import Commands, add_command
from slotwise.cli.workload_options import Defaults, add_seed_option, add_workload_options, workload_of
from slotwise.core.settings import whole
from slotwise.files import write_output
from slotwise.policies.settings import POLICIES
from slotwise.simulate.capacity_search import LOADS, CapacityTarget, LoadPoint, at_load, fewest, interval
from slotwise.simulate.simulator import Setup
from slotwise.terminal import duration, plain
from slotwise.workload.workloads import Workload

WORKLOAD = Defaults(num_prompts=1000, arrivals="poisson:1")
ROUNDS = 10
NAMES = {"ttft_p": "ttft", "tpot_p": "tpot"}
UNITS = {"ms": 1e-3, "s": 1.0}
SLOTS, TOKENS, STALLS = (8, 16, 32, 64, 128), (256, 512, 1024, 2048), (30.0, 70.0, 150.0)


def add(commands: Commands) -> None:
    capacity = add_command(commands, "capacity", "find how many replicas a workload needs, by simulation", run)
    capacity.add_argument("--bootstrap", type=Number(whole(0, 1000)), default=ROUNDS, metavar="N",
                          help=f"resampled workloads for the interval; 0: none (default: {ROUNDS})")
    capacity.add_argument("--plot", metavar="FILE", help="draw goodput against load here, with the knee, as SVG")
    tune = add_command(commands, "tune", "find the scheduling settings that suit a workload, by simulation", run_tune)
    tune.add_argument("--output", metavar="FILE", help="write the best settings here, for `serve --config FILE`")
    for command in (capacity, tune):
        command.add_argument("--slo", required=True, type=_target, metavar="ttft_p99=TIME,tpot_p99=TIME",
                             help="limits that a share of all requests must keep, as ttft_p99=1s,tpot_p99=80ms")
        add_machine_options(command)
        add_workload_options(command, WORKLOAD)
        add_seed_option(command)


def _target(text: str) -> CapacityTarget:
    """The type of --slo; all its limits have the same percentile."""
    limits: dict[str, float] = {}
    percents = set()
    for word in text.split(","):
        name, _, limit = word.strip().partition("=")
        key = next((key for beginning, key in NAMES.items() if name.startswith(beginning)), "")
        unit = next((unit for unit in UNITS if limit.endswith(unit)), "")
        try:
            percents.add(float(name[6:]))
            seconds = float(limit.removesuffix(unit)) * UNITS[unit]
        except (ValueError, KeyError):
            key, seconds = "", 0.0
        if not key or not 0 < seconds < 86_400 or key in limits:
            raise argparse.ArgumentTypeError(f"{word.strip()!r:.80} does not read as ttft_p99=1s or tpot_p99=80ms")
        limits[key] = seconds
    if len(percents) > 1 or not all(0 < percent < 100 for percent in percents):
        raise argparse.ArgumentTypeError("all limits need the same percentile, between 0 and 100")
    return CapacityTarget(**limits, share=percents.pop() / 100)


# -- capacity ----------------------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace) -> int:
    setup, about = setup_of_machine(asked)
    workload, target = workload_of(asked, WORKLOAD), asked.slo
    replicas = fewest(workload, setup, target)
    console = Console(highlight=False)
    bounds = ""
    if asked.bootstrap:
        low, high = interval(workload, setup, target, replicas, asked.bootstrap)
        bounds = f" ({low} to {high} for nine tenths of {asked.bootstrap} resampled workloads)"
    console.print(plain(f"{replicas} replicas of {about}{bounds}"))
    numbers = [number for number in (replicas - 1, replicas, replicas + 1) if number]
    console.print(_table("one fewer, one more", [at_load(workload, setup, target, number) for number in numbers]))
    loads = [at_load(workload, setup, target, replicas, load) for load in LOADS]
    console.print(_table(f"{replicas} replicas at other loads", loads))
    knee = max((one for one in loads if one.met), key=lambda one: one.load, default=None)
    if asked.plot:
        _draw(asked.plot, f"{replicas} replicas of {about.partition(' (')[0]}", loads, knee)
    console.print(plain("the objective is met at none of these loads" if knee is None else
                        f"the objective is met up to {knee.load:g} of the load, {knee.offered:.3g} requests a second"))
    return 0


def _draw(path: str, title: str, loads: Sequence[LoadPoint], knee: LoadPoint | None) -> None:
    from slotwise.bench.report.plots import knee_plot

    points = {one: (one.offered, one.figures.goodput) for one in loads}
    write_output(path, knee_plot(title, list(points.values()), points.get(knee) if knee else None).encode())


def _table(title: str, loads: Sequence[LoadPoint]) -> Table:
    table = Table(title=plain(title), title_justify="left", header_style="bold")
    for head in ("replicas", "load", "offered/s", "goodput/s", "ttft p99", "itl p99", "refused", "objective"):
        table.add_column(head, justify="right")
    for one in loads:
        found = one.figures
        table.add_row(
            str(one.replicas), f"{one.load:g}", f"{one.offered:.4g}", f"{found.goodput:.4g}",
            duration(found.ttft_p99), duration(found.itl_p99), str(found.refused),
            "met" if one.met else "missed")
    return table


# -- tune --------------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    settings: dict[str, Any]
    found: LoadPoint

    @property
    def merit(self) -> tuple[float, float]:
        """Goodput first, then the shorter wait for a first token."""
        return self.found.figures.goodput, -self.found.figures.ttft_p99


def run_tune(asked: argparse.Namespace) -> int:
    setup, about = setup_of_machine(asked)
    candidates = _candidates(setup, workload_of(asked, WORKLOAD), asked.slo)
    now = candidates[0]
    best = max(candidates, key=lambda one: one.merit)
    shown = sorted(candidates, key=lambda one: one.merit, reverse=True)[:8]
    console = Console(highlight=False)
    table = Table(title=plain(f"settings on {about}, the best first"), title_justify="left", header_style="bold")
    for head in (*best.settings, "goodput/s", "ttft p99", "itl p99"):
        table.add_column(head, justify="right")
    for one in shown if now in shown else [*shown, now]:
        figures = one.found.figures
        table.add_row(*map(str, one.settings.values()), f"{figures.goodput:.4g}", duration(figures.ttft_p99),
                      duration(figures.itl_p99), style="bold" if one is now else "")
    console.print(table)
    console.print(plain("bold: the settings now"))
    if asked.output:
        lines = [f"{name.replace('_', '-')}: {value}\n" for name, value in best.settings.items()]
        write_output(asked.output, "".join(lines).encode())
        print(f"\nwritten to {asked.output}")
    return 0


def _candidates(setup: Setup, workload: Workload, target: CapacityTarget) -> list[Candidate]:
    """Returns the settings now, then what one pass over each setting in turn has tried, keeping the best so far."""
    def tried(settings: dict[str, Any]) -> Candidate:
        return Candidate(settings, at_load(workload, setup.changed(settings), target, 1))

    limits, scheduling = setup.limits, setup.scheduling
    best = tried({
        "max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_stall_ms": limits.max_stall_ms, "scheduling_policy": scheduling.ordering.kind})
    found = [best]
    for name, values in (("max_num_seqs", SLOTS), ("max_num_batched_tokens", TOKENS), ("max_stall_ms", STALLS),
                         ("scheduling_policy", POLICIES)):
        others = [tried(best.settings | {name: value}) for value in values
                  if value != best.settings[name] and _fits(best.settings | {name: value}, setup)]
        found += others
        best = max([best, *others], key=lambda one: one.merit)
    return found


def _fits(settings: dict[str, Any], setup: Setup) -> bool:
    """Whether a step has a token for each slot, and the cache a block."""
    slots: int = settings["max_num_seqs"]
    tokens: int = settings["max_num_batched_tokens"]
    return slots <= min(tokens, setup.limits.num_blocks)
