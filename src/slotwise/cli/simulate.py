"""slotwise simulate, slotwise what-if: servers on a virtual clock, with the scheduler that serves."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from slotwise.cli.numbers import Number
from slotwise.cli.options import (
    Commands,
    add_command,
    add_engine_options,
    add_overwrite_option,
    input_file,
)
from slotwise.cli.workload_options import Defaults, add_seed_option, add_workload_options, workload_of
from slotwise.core.ranges import real, whole
from slotwise.engine.messages import Command, Configure
from slotwise.observe.event_log import read_file
from slotwise.simulate.figures import Figures, Objectives, figures, grouped
from slotwise.simulate.machines import ModelShape, described, names, setup_of
from slotwise.simulate.recorded import Recording, read_recording
from slotwise.simulate.simulator import Server, Setup, SimulatedRequest, simulate
from slotwise.simulate.traffic import traffic_of
from slotwise.terminal import plain

MS = 1000.0
MAX_REPLICAS = 1000
MAX_MS = 86_400_000.0
WORKLOAD = Defaults(num_prompts=1000, arrivals="poisson:1")
ENGINE = ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--max-stall-ms", "--enable-prefix-caching")
LATENCIES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
ROWS = (("first token, p50", "ttft_p50"), ("first token, p99", "ttft_p99"), ("between tokens, p50", "itl_p50"),
        ("between tokens, p99", "itl_p99"), ("output tokens a second", "output_throughput"),
        ("goodput, requests a second", "goodput"), ("requests served", "served"), ("requests refused", "refused"))


def add(commands: Commands) -> None:
    command = add_command(commands, "simulate", "run a workload on a server's scheduler and a virtual clock", run)
    command.add_argument("--machine", required=True, metavar="NAME|LOG", help="a machine of the package's file, with "
                         f"--model: {', '.join(names())}; or an event log, whose engine's settings and step times are "
                         "taken")
    command.add_argument("--model", metavar="MODEL", help="with a machine's name: a checkpoint's folder or GGUF file, "
                         "of which only the config is read")
    command.add_argument("--replicas", type=Number(whole(1, MAX_REPLICAS)), default=1, metavar="N",
                         help="servers behind a router that chooses the one with the fewest unfinished requests "
                         "(default: 1)")
    command.add_argument("--event-log", default="", metavar="FILE", help="write the simulation's event log, for "
                         "`slotwise timeline` and `slotwise explain`; of one replica")
    add_overwrite_option(command)
    _add_common(command)
    add_engine_options(command, ENGINE)
    for name in ENGINE:
        command.set_defaults(**{name.removeprefix("--").replace("-", "_"): None})
    add_workload_options(command, WORKLOAD)
    add_seed_option(command)
    command = add_command(commands, "what-if", "replay the traffic of an event log under other scheduling settings",
                          run_what_if)
    command.add_argument("log", type=input_file, help="a file written by `slotwise serve --event-log FILE`")
    _add_common(command)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="append", default=[], type=_change, metavar="NAME=VALUE", dest="changes",
                         help="change a scheduling setting, named as in `PUT /admin/scheduling`; repeatable")
    command.add_argument("--ttft-ms", type=Number(real(0.001, MAX_MS)), metavar="MS",
                         help="goodput: most milliseconds to the first token (default: any)")
    command.add_argument("--tpot-ms", type=Number(real(0.001, MAX_MS)), metavar="MS",
                         help="goodput: most milliseconds per token after it (default: any)")
    command.add_argument("--json", metavar="FILE", help="write the figures here")


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r:.80} does not read as NAME=VALUE")
    try:
        return name.strip().replace("-", "_"), json.loads(value)
    except ValueError:
        return name.strip().replace("-", "_"), value


def _objectives(asked: argparse.Namespace) -> Objectives:
    return Objectives(*(None if one is None else one / MS for one in (asked.ttft_ms, asked.tpot_ms)))


# -- simulate ----------------------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace) -> int:
    setup, about = _setup(asked)
    setup = setup.changed(dict(asked.changes)) if asked.changes else setup
    if asked.event_log and asked.replicas > 1:
        raise ValueError("--event-log is of one server: leave out --replicas, or it")
    workload = workload_of(asked, WORKLOAD)
    traffic = traffic_of(workload)
    with ExitStack() as stack:
        servers = [Server(setup) for _ in range(asked.replicas)]
        if asked.event_log:
            servers = [_logged(asked, setup, stack)]
        requests = simulate(traffic, servers)
    found = figures(list(requests.values()), _objectives(asked))
    Console(highlight=False).print(_table(f"simulated on {about}", {"simulated": found}))
    _write(asked.json, {"machine": about, "replicas": asked.replicas, "seed": asked.seed,
                        "settings": setup.scheduling.as_settings(), "figures": found.as_json()})
    return 0


def _setup(asked: argparse.Namespace) -> tuple[Setup, str]:
    """Returns the setup of a server on the machine, and words for the machine."""
    if os.path.isfile(asked.machine):
        given = [name for name in ("--model", *ENGINE) if getattr(asked, name[2:].replace("-", "_")) is not None]
        if given:
            raise ValueError(f"{given[0]} is for a machine of the file: the log says what its engine had; use --set")
        setup, recording = read_recording(read_file(asked.machine))
        return setup, f"the machine of {asked.machine} ({recording.run.model}, {recording.run.device})"
    if asked.model is None:
        raise ValueError("--machine with a machine's name needs --model; an event log must be a file")
    from slotwise.engine.config import EngineConfig

    options = {name[2:].replace("-", "_"): getattr(asked, name[2:].replace("-", "_")) for name in ENGINE}
    config = EngineConfig.of(model=asked.model, **{name: value for name, value in options.items() if value is not None})
    return setup_of(asked.machine, _shape(asked.model), config), described(asked.machine)


def _shape(model: str) -> ModelShape:
    """Returns a model's shape, from its config; in bfloat16."""
    from slotwise.model.checkpoint import read_config
    from slotwise.model.locate import locate

    config = read_config(locate(model))
    head, width = config.hidden_size * config.vocab_size, 2
    if config.mixture is not None:
        raise ValueError("the roofline of a mixture of experts depends on which experts a step hits: name an event log")
    positions = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    return ModelShape((config.layer_weights + head) * width, positions, config.layer_weights, head,
                      4 * config.num_layers * config.num_heads * config.head_dim, config.max_position_embeddings)


def _logged(asked: argparse.Namespace, setup: Setup, stack: ExitStack) -> Server:
    """Returns a server that writes its event log."""
    from slotwise.observe.log_file import LogFile
    from slotwise.observe.recorder import Recorder
    from slotwise.observe.ring import Ring

    file = stack.enter_context(LogFile(asked.event_log, overwrite=asked.overwrite_event_log))
    recorder = Recorder(Ring(capacity=1), lambda: 0, lambda: 0.0)
    recorder.write_to(file)
    return Server(setup, observers=[recorder])


# -- what-if -----------------------------------------------------------------------------------------------------------


def run_what_if(asked: argparse.Namespace) -> int:
    if not asked.changes:
        raise ValueError("say what would change: --set NAME=VALUE")
    setup, recording = read_recording(read_file(asked.log))
    objectives = _objectives(asked)
    changed = setup.changed(dict(asked.changes))
    traffic = recording.traffic
    runs: dict[str, Mapping[str, SimulatedRequest]] = {
        "measured": recording.measured,
        "replayed": simulate(traffic, [Server(setup, recording.outputs)]),
        "what if": simulate(_without_changes(traffic), [Server(changed, recording.outputs)])}
    groups = _groups(recording, runs, objectives)
    console = Console(highlight=False)
    for name, found in groups.items():
        console.print(_table(name, found, has_error=True))
    console.print(plain("error: replayed under the log's own settings, against measured"))
    if recording.num_refused:
        console.print(plain(f"{recording.num_refused} requests were refused while the log was written: their lengths "
                            "are unknown, and they are in no figure"))
    _write(asked.json, {
        "log": asked.log, "changes": dict(asked.changes), "settings": changed.scheduling.as_settings(),
        "refused_before_the_log": recording.num_refused,
        "groups": {name: {run: one.as_json() for run, one in found.items()} for name, found in groups.items()}})
    return 0


def _without_changes(traffic: Iterable[tuple[float, Command]]) -> list[tuple[float, Command]]:
    """The traffic without what an operator changed meanwhile: the settings in question hold from the start."""
    return [(at, command) for at, command in traffic if not isinstance(command, Configure)]


def _groups(recording: Recording, runs: Mapping[str, Mapping[str, SimulatedRequest]], objectives: Objectives,
            ) -> dict[str, dict[str, Figures]]:
    """Returns the figures of all requests, then by tenant and by tier where there are several."""
    found = {"all requests": {run: figures(list(requests.values()), objectives) for run, requests in runs.items()}}
    for what, group_of in (("tenant", recording.tenants), ("tier", recording.tiers)):
        names_of = sorted(set(group_of.values()))
        by_run = {run: grouped(requests, group_of) for run, requests in runs.items()}
        for name in names_of if len(names_of) > 1 else []:
            found[f"{what} {name or 'without a name'}"] = {
                run: figures(groups[name], objectives) for run, groups in by_run.items()}
    return found


# -- output ------------------------------------------------------------------------------------------------------------


def _table(title: str, runs: Mapping[str, Figures], *, has_error: bool = False) -> Table:
    table = Table(title=plain(title), title_justify="left", header_style="bold")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    if has_error:
        table.add_column("error", justify="right")
    for words, name in ROWS:
        values: Sequence[float] = [getattr(one, name) for one in runs.values()]
        cells = [f"{value * MS:,.1f} ms" if name in LATENCIES else f"{value:,.6g}" for value in values]
        if has_error:
            cells.append(f"{values[1] / values[0] - 1:+.1%}" if values[0] else "–")
        table.add_row(words, *cells)
    return table


def _write(path: str | None, result: dict[str, Any]) -> None:
    if path:
        from slotwise.bench.results import write_json

        write_json(path, {"version": 1, **result})
        print(f"\nwritten to {path}")
