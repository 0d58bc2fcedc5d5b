"""slotwise simulate, slotwise what-if: servers on a virtual clock, with the scheduler that serves."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from slotwise.cli.machine_options import MAX_MS, MS, add_machine_options, setup_of_machine
from slotwise.cli.numbers import Number
from slotwise.cli.options import (
    Commands,
    add_command,
    add_overwrite_option,
    input_file,
)
from slotwise.cli.workload_options import Defaults, add_seed_option, add_workload_options, workload_of
from slotwise.core.settings import real, whole
from slotwise.errors import printable
from slotwise.observe.event_log import read_file
from slotwise.routing.routers import ROUTERS
from slotwise.simulate.figures import WORDS, Figures, LatencyLimits, SimulatedRequest, figures
from slotwise.simulate.simulated_routing import RoutedServers
from slotwise.simulate.simulator import InstantKVLink, Server, Setup, Traffic, simulate, simulate_apart, traffic_of
from slotwise.simulate.what_if import MEASURED, REPLAYED, WHAT_IF, error_of, in_words, is_reliable, what_if
from slotwise.terminal import duration, plain

MAX_REPLICAS = 1000
MAX_ERROR = 8000  # bytes read of an answer that is an error
WORKLOAD = Defaults(num_prompts=1000, arrivals="poisson:1")
LATENCIES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def add(commands: Commands) -> None:
    command = add_command(commands, "simulate", "run a workload on a server's scheduler and a virtual clock", run)
    add_machine_options(command)
    command.add_argument("--replicas", type=Number(whole(1, MAX_REPLICAS)), default=1, metavar="N",
                         help="servers behind a router (default: 1)")
    for role, what in (("prefill", "compute prompts"), ("decode", "answer")):
        command.add_argument(f"--{role}-replicas", type=Number(whole(1, MAX_REPLICAS)), default=None, metavar="N",
                             help=f"in place of --replicas: servers that {what}, as those of `slotwise scale`")
    command.add_argument("--transfer-us", type=Number(real(0, 1e6)), default=None, metavar="US", help="with "
                         "--prefill-replicas: microseconds in which a prompt's token travels (default: 0)")
    command.add_argument("--router", choices=tuple(ROUTERS), default=None, help="as that of `slotwise scale` (default: "
                         "the server with the fewest unfinished requests, known at once)")
    command.add_argument("--event-log", default="", metavar="FILE", help="write the simulation's event log, for "
                         "`slotwise timeline` and `slotwise explain`; of one replica")
    add_overwrite_option(command)
    add_changes_option(command)
    _add_common(command)
    add_workload_options(command, WORKLOAD)
    add_seed_option(command)
    command = add_command(commands, "what-if", "replay the traffic of an event log under other scheduling settings",
                          run_what_if)
    command.add_argument("log", nargs="?", type=input_file, help="a file written by `slotwise serve --event-log FILE`")
    command.add_argument("--url", metavar="URL", help="instead of a log: ask the server there about its last minutes")
    command.add_argument("--api-key", default=os.environ.get("SLOTWISE_ADMIN_API_KEY", "").partition(",")[0],
                         metavar="KEY", help="the server's admin key (default: $SLOTWISE_ADMIN_API_KEY)")
    command.add_argument("--replica", default="", metavar="NAME",
                         help="with --url of a router: the replica that is asked")
    command.add_argument("--request", default="", metavar="ID", help="also tell when this request would have had its "
                         "first token")
    add_changes_option(command)
    _add_common(command)


def add_changes_option(command: argparse.ArgumentParser) -> None:
    """The option whose pairs `simulate.what_if` takes as changes."""
    command.add_argument("--set", action="append", default=[], type=_change, metavar="NAME=VALUE", dest="changes",
                         help="change a scheduling setting, named as in `PUT /admin/scheduling`; repeatable")


def _add_common(command: argparse.ArgumentParser) -> None:
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


def _objectives(asked: argparse.Namespace) -> LatencyLimits:
    return LatencyLimits(*(None if one is None else one / MS for one in (asked.ttft_ms, asked.tpot_ms)))


# -- simulate ----------------------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace) -> int:
    setup, about = setup_of_machine(asked)
    setup = setup.changed(dict(asked.changes)) if asked.changes else setup
    _check_roles(asked, setup)
    if asked.event_log and asked.replicas > 1:
        raise ValueError("--event-log is of one server: leave out --replicas, or it")
    if asked.router and asked.replicas == 1:
        raise ValueError("--router chooses among several servers: give --replicas, too")
    traffic = traffic_of(workload_of(asked, WORKLOAD), setup.adapters.number)
    requests = (_apart if asked.prefill_replicas else _alike)(asked, setup, traffic)
    found = figures(list(requests.values()), _objectives(asked))
    Console(highlight=False).print(_table(f"simulated on {about}", {"simulated": found}))
    roles = {"prefill": asked.prefill_replicas, "decode": asked.decode_replicas}
    _write(asked.json, {"machine": about, "replicas": roles if asked.prefill_replicas else asked.replicas, "seed":
                        asked.seed, "settings": setup.scheduling.as_settings(), "figures": found.as_json()})
    return 0


def _alike(asked: argparse.Namespace, setup: Setup, traffic: Traffic) -> dict[int, SimulatedRequest]:
    """Simulates servers without roles."""
    routed = (RoutedServers(ROUTERS[asked.router](asked.seed), asked.replicas, setup.pace)
              if asked.router else None)
    told = [[one] for one in routed.observers] if routed is not None else [[]] * asked.replicas
    with ExitStack() as stack:
        servers = [Server(setup, observers=observers, replica=number) for number, observers in enumerate(told)]
        if asked.event_log:
            servers = [_logged(asked, setup, stack)]
        return simulate(traffic, servers, routed=routed)


def _apart(asked: argparse.Namespace, setup: Setup, traffic: Traffic) -> dict[int, SimulatedRequest]:
    """Simulates servers of which some compute prompts, and others answer."""
    prefill = [Server(setup, replica=number) for number in range(asked.prefill_replicas)]
    decode = [Server(setup, replica=number, kv_link=InstantKVLink(setup.limits.block_size))
              for number in range(asked.decode_replicas)]
    return simulate_apart(traffic, prefill, decode, (asked.transfer_us or 0.0) * 1e-6)


def _check_roles(asked: argparse.Namespace, setup: Setup) -> None:
    """Raises ValueError for options that contradict servers with roles."""
    if (asked.prefill_replicas is None) != (asked.decode_replicas is None):
        raise ValueError("--prefill-replicas and --decode-replicas go together: give both")
    if asked.prefill_replicas is None:
        if asked.transfer_us is not None:
            raise ValueError("--transfer-us is of prompts that travel: give --prefill-replicas and --decode-replicas")
        return
    for name, is_given in (("--replicas", asked.replicas > 1), ("--router", asked.router), ("--event-log",
                           asked.event_log), ("--adapters", asked.adapters), ("--acceptance", asked.acceptance)):
        if is_given:
            raise ValueError(f"{name} is not for servers with roles: leave it out beside --prefill-replicas")
    if setup.limits.stages > 1 or setup.draft_model is not None:
        raise ValueError("servers with roles have one stage and no draft model")


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
    if (asked.log is None) == (asked.url is None):
        raise ValueError("name either an event log or a server, with --url")
    if asked.replica and asked.url is None:
        raise ValueError("--replica is of a router: give its --url")
    changes = dict(asked.changes)
    answer = _asked_server(asked, changes) if asked.url else what_if(
        read_file(asked.log), changes, _objectives(asked), asked.request)
    console = Console(highlight=False)
    for name, found in answer["groups"].items():
        worth = answer["verdicts"][name]
        console.print(plain(worth["text"], "" if worth["is_reliable"] else "bold red"))
        console.print(_table(name, {run.replace("_", " "): Figures(**one) for run, one in found.items()}, worth))
    console.print(plain(f"{answer['requests']} requests within {duration(answer['seconds'])}; error: replayed under "
                        "the settings in force, against measured"))
    if (held := answer.get("held_seconds", 0.0)) > answer["seconds"]:
        console.print(plain(f"the server holds {duration(held)} of traffic: it had the time to replay the latest of "
                            "it, and no more"))
    if answer["refused_unknown"]:
        console.print(plain(f"{answer['refused_unknown']} requests were refused meanwhile: their lengths are unknown, "
                            "and they are in no figure"))
    if "request" in answer:
        console.print(plain(counterfactual(answer["request"], asked.changes)))
    _write(asked.json, answer)
    return 0


def counterfactual(found: Mapping[str, Any], changes: Sequence[tuple[str, Any]]) -> str:
    """Returns what a what-if says of one request, as a sentence."""
    def first(run: str) -> str:
        return "never" if (at := found[run]["first_token"]) is None else f"after {duration(at)}"

    settings = ", ".join(f"{name} {value}" for name, value in changes)
    error = error_of(*(found[run]["first_token"] or 0.0 for run in (MEASURED, REPLAYED)))
    warning = "" if is_reliable(error) else in_words(error, "its first token") + " "
    return (f"{warning}had {found['id']} arrived under {settings}: its first token {first(WHAT_IF)} instead of "
            f"{first(MEASURED)} (replayed under the settings in force: {first(REPLAYED)})")


def _asked_server(asked: argparse.Namespace, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of a running server about its own last minutes.  Raises RuntimeError for a refusal."""
    given = {"ttft_ms": asked.ttft_ms, "tpot_ms": asked.tpot_ms, "request_id": asked.request or None}
    body = {"changes": changes} | {name: value for name, value in given.items() if value is not None}
    headers = {"Content-Type": "application/json"}
    if asked.api_key:
        headers["Authorization"] = f"Bearer {asked.api_key}"
    named = f"?{urllib.parse.urlencode({'replica': asked.replica})}" if asked.replica else ""
    request = urllib.request.Request(f"{asked.url.rstrip('/')}/what_if{named}", json.dumps(body).encode(), headers)
    waiting = Console(stderr=True).status("The server replays its last minutes, beside its streams: ten seconds")
    try:
        with waiting, urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read(MAX_ERROR).decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["error"]["message"]
        raise RuntimeError(f"the server answered {error.code}: {printable(said)}") from error
    except urllib.error.URLError as error:
        raise RuntimeError(f"{asked.url} cannot be reached ({error.reason}): give the URL of a server") from error
    return answer


# -- output ------------------------------------------------------------------------------------------------------------


def _table(title: str, runs: Mapping[str, Figures], worth: Mapping[str, Any] | None = None) -> Table:
    """Args: worth: the verdict on the last run; None: nothing was measured."""
    table = Table(title=plain(title), title_justify="left", header_style="bold")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    if worth is not None:
        table.add_column("error", justify="right")
    for name, words in WORDS.items():
        values: Sequence[float] = [getattr(one, name) for one in runs.values()]
        cells = [duration(value) if name in LATENCIES else f"{value:,.6g}" for value in values]
        style = ""
        if worth is not None:
            error = worth["errors"][name]
            cells.append("–" if error is None else f"{error:+.1%}")
            if name in worth["unreliable"]:
                cells[-1] += ", not reliable"
                style = "dim"
        table.add_row(words, *cells, style=style)
    return table


def _write(path: str | None, result: dict[str, Any]) -> None:
    if path:
        from slotwise.bench.results import write_json

        write_json(path, {"version": 1, **result})
        print(f"\nwritten to {path}")
