"""slotwise simulate, what-if, capacity and tune: a server in simulated time, and the machine it runs on."""

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
from dataclasses import replace
from typing import Any, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from slotwise.cli.options_of_settings import (
    Commands,
    Number,
    add_command,
    add_engine_options,
    add_overwrite_option,
    input_file,
    option_of,
)
from slotwise.cli.pull import find_model
from slotwise.cli.workload_options import (
    WORKLOAD_OPTIONS,
    Defaults,
    add_seed_option,
    add_workload_options,
    refuse_beside,
    workload_of,
)
from slotwise.core.policies.policy_settings import POLICIES
from slotwise.core.routing.routers import ROUTERS
from slotwise.core.setting_fields import real, whole
from slotwise.errors import printable
from slotwise.measure.simulate.capacity_search import LOADS, CapacityTarget, LoadPoint, at_load, fewest, interval
from slotwise.measure.simulate.eviction_replay import compare, working_set
from slotwise.measure.simulate.figures import WORDS, Figures, LatencyLimits, SimulatedRequest, figures
from slotwise.measure.simulate.machines import LINK, ModelShape, described, names, setup_of
from slotwise.measure.simulate.recorded import read_recording
from slotwise.measure.simulate.simulated_routing import RoutedServers
from slotwise.measure.simulate.simulator import (
    AdapterLoad,
    InstantKVLink,
    Server,
    Setup,
    Traffic,
    simulate,
    simulate_apart,
    traffic_of,
)
from slotwise.measure.simulate.virtual_machine import SimulatedDraftModel
from slotwise.measure.simulate.what_if import MEASURED, REPLAYED, WHAT_IF, error_of, in_words, is_reliable, what_if
from slotwise.measure.workload.sessions import sessions_of
from slotwise.measure.workload.workloads import Workload
from slotwise.observe.log_file import read_file
from slotwise.platform.files import write_output
from slotwise.platform.terminal import duration, plain

MS = 1000.0
MINUTES = 10.0  # of sessions
MAX_ADAPTERS = 4096
MAX_MS = 86_400_000.0
RETENTION = real(0.001, 86_400)
ENGINE = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_stall_ms", "enable_prefix_caching",
          "tensor_parallel_size", "pipeline_parallel_size")


def add_machine_options(command: argparse.ArgumentParser) -> None:
    """Options of the server that is simulated; `setup_of_machine` reads them."""
    command.add_argument("--machine", required=True, metavar="NAME|LOG", help="a machine of the package's file, with "
                         f"--model: {', '.join(names())}; or an event log, whose engine's settings and step times are "
                         "taken")
    command.add_argument("--model", metavar="MODEL", help="with a machine's name: a checkpoint's folder or GGUF file, "
                         "of which only the config is read")
    command.add_argument("--acceptance", type=_shares, metavar="SHARE,...", help="simulate a draft model: of a row's "
                         "drafts the share that is right at each position where those before are, from 0 to 1; there "
                         "are as many drafts as shares, or fewer (default: a log's, else no drafts)")
    command.add_argument("--draft-ms", type=Number(real(0, MAX_MS)), default=None, metavar="MS",
                         help="with --acceptance: milliseconds of a pass of the draft model (default: 0)")
    command.add_argument("--link-us", type=Number(real(0, 1e6)), default=None, metavar="US",
                         help="with several ranks: microseconds in which they exchange the sums of a layer, and hand a "
                         f"step on to the next stage (default: {LINK * 1e6:g})")
    command.add_argument("--adapters", type=Number(whole(1, MAX_ADAPTERS)), default=None, metavar="N",
                         help="each request is of one of N LoRA adapters, in turn (default: of none)")
    command.add_argument("--max-loras", type=Number(whole(1, MAX_ADAPTERS)), default=None, metavar="N",
                         help="with --adapters: adapters among the rows of one step (default: 1)")
    command.add_argument("--adapter-ms", type=Number(real(0, MAX_MS)), default=None, metavar="MS",
                         help="with --adapters: milliseconds that each adapter among a step's rows takes (default: 0)")
    add_engine_options(command, ENGINE)
    command.set_defaults(**dict.fromkeys(ENGINE))


def _shares(text: str) -> tuple[float, ...]:
    """The type of --acceptance."""
    try:
        return SimulatedDraftModel(tuple(map(float, text.split(",")))).shares
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} does not read as shares from 0 to 1, as 0.8,0.7,0.6") from None


def setup_of_machine(asked: argparse.Namespace) -> tuple[Setup, str]:
    """Returns the setup of a server on the machine, and words for the machine."""
    setup, about = _machine(asked)
    setup = _with_adapters(setup, asked)
    if asked.acceptance is None:
        if asked.draft_ms is not None:
            raise ValueError("--draft-ms is of the draft model that --acceptance describes")
        return setup, about
    model = SimulatedDraftModel(asked.acceptance, (asked.draft_ms or 0.0) / MS)
    return replace(setup, speculation=model.speculation, draft_model=model), about


def _with_adapters(setup: Setup, asked: argparse.Namespace) -> Setup:
    if asked.adapters is None:
        for name in ("max_loras", "adapter_ms"):
            if getattr(asked, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is of the adapters of --adapters")
        return setup
    limits = replace(setup.limits, max_loras=asked.max_loras or setup.limits.max_loras)
    return replace(setup, limits=limits, adapters=AdapterLoad(asked.adapters, (asked.adapter_ms or 0.0) / MS))


def _machine(asked: argparse.Namespace) -> tuple[Setup, str]:
    if os.path.isfile(asked.machine):
        given = [name for name in ("model", "link_us", *ENGINE) if getattr(asked, name) is not None]
        if given:
            raise ValueError(f"{option_of(given[0])} is for a machine of the file: the log says what its engine had")
        setup, recording = read_recording(read_file(asked.machine))
        run, error = recording.run, recording.times.error
        return setup, (f"the machine of {asked.machine} ({run.model}, {run.device}; its step times are predicted with "
                       f"a median error of {error:.0%})")
    if asked.model is None:
        raise ValueError("--machine with a machine's name needs --model; an event log must be a file")
    from slotwise.engine.config import EngineConfig

    options = {name: value for name in ENGINE if (value := getattr(asked, name)) is not None}
    config = EngineConfig.of(model=asked.model, **options)
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if asked.link_us is not None and ranks == 1:
        raise ValueError("--link-us is between ranks: give --tensor-parallel-size or --pipeline-parallel-size, too")
    link = LINK if asked.link_us is None else asked.link_us * 1e-6
    return setup_of(asked.machine, _shape(asked.model), config, link), (
        f"{ranks} of " * (ranks > 1) + described(asked.machine))


def _shape(model: str) -> ModelShape:
    """Returns a model's shape, from its config; in bfloat16."""
    from slotwise.compute.model.loading import read_config

    config = read_config(find_model(model).path)
    head, width = config.hidden_size * config.vocab_size, 2
    if config.mixture is not None:
        raise ValueError("the roofline of a mixture of experts depends on which experts a step hits: name an event log")
    if config.recurrent is not None:
        raise ValueError("recurrent states, which steps read and write whole, are in no data sheet: name an event log")
    positions = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    if config.latent is not None:
        raise ValueError("the roofline of compressed attention is in no data sheet: name an event log")
    return ModelShape((config.layer_weights + head) * width, positions, config.layer_weights, head,
                      4 * config.num_layers * config.num_heads * config.head_dim, config.max_position_embeddings,
                      config.num_layers)


MAX_REPLICAS = 1000
MAX_MINUTES = 1440.0
MAX_QUEUED = 1 << 40  # requests and tokens that may wait: more than any traffic has
OF_SESSIONS = {"found_share": "found", "computed": "computed", "ttft_mean": "ttft", "ttft_p99": "ttft p99",
               "session_mean": "session", "session_p99": "session p99"}  # figures, and their columns
MAX_ERROR = 8000  # bytes read of an answer that is an error
WORKLOAD = Defaults(num_prompts=1000, arrivals="poisson:1")
LATENCIES = ("ttft_mean", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def add(commands: Commands) -> None:
    _add_simulate(commands)
    _add_searches(commands)


def _add_simulate(commands: Commands) -> None:
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
    command.add_argument("--sessions", metavar="agents|prefixes|FILE", help="in place of a workload: sessions whose "
                         "requests build on one another, drawn or of a trace in Mooncake's form, under each eviction "
                         "policy, next to a bound from hindsight")
    command.add_argument("--minutes", type=Number(real(0.1, MAX_MINUTES)), metavar="N",
                         help=f"with --sessions: minutes of traffic (default: {MINUTES:g})")
    command.add_argument("--cache-share", type=Number(real(0.001, 1)), default=None, metavar="SHARE", help="with "
                         "--sessions: the share of all their different blocks that the cache holds (default: the "
                         "machine's cache)")
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
    command.add_argument("--retain", action="append", default=[], type=_retention, metavar="SESSION=SECONDS",
                         help="retain the prompts of a session for as long, or with * those of all; repeatable")
    add_changes_option(command)
    _add_common(command)


def add_changes_option(command: argparse.ArgumentParser) -> None:
    """The option whose pairs `measure.simulate.what_if` takes as changes."""
    command.add_argument("--set", action="append", default=[], type=_change, metavar="NAME=VALUE", dest="changes",
                         help="change a scheduling setting, named as in `PUT /admin/scheduling`; repeatable")


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ttft-ms", type=Number(real(0.001, MAX_MS)), metavar="MS",
                         help="goodput: most milliseconds to the first token (default: any)")
    command.add_argument("--tpot-ms", type=Number(real(0.001, MAX_MS)), metavar="MS",
                         help="goodput: most milliseconds per token after it (default: any)")
    command.add_argument("--json", metavar="FILE", help="write the figures here")


def _retention(text: str) -> tuple[str, float]:
    session, _, seconds = text.rpartition("=")
    try:
        return session, cast("float", RETENTION.checked(float(seconds)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} does not read as SESSION=SECONDS, {RETENTION}") from None


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
    if asked.sessions:
        refuse_beside(asked, "--sessions", (*WORKLOAD_OPTIONS, "ttft_ms", "tpot_ms"))
        return _run_sessions(asked, setup, about)
    refuse_beside(asked, "a simulation without --sessions", ("minutes", "cache_share"))
    traffic = traffic_of(workload_of(asked, WORKLOAD), setup.adapters.number)
    requests = (_apart if asked.prefill_replicas else _alike)(asked, setup, traffic)
    found = figures(list(requests.values()), _objectives(asked))
    Console(highlight=False).print(_table(f"simulated on {about}", {"simulated": found}))
    roles = {"prefill": asked.prefill_replicas, "decode": asked.decode_replicas}
    _write(asked.json, {"machine": about, "replicas": roles if asked.prefill_replicas else asked.replicas, "seed":
                        asked.seed, "settings": setup.scheduling.as_settings(), "figures": found.as_json()})
    return 0


def _run_sessions(asked: argparse.Namespace, setup: Setup, about: str) -> int:
    """Replays sessions under each order of eviction."""
    if asked.replicas > 1 or asked.prefill_replicas or asked.event_log or asked.adapters:
        raise ValueError("--sessions are of one server: leave out --replicas, roles, --event-log and --adapters")
    if not setup.limits.enable_prefix_caching:
        raise ValueError("--sessions compare what a prefix cache finds, and this server has none")
    minutes = MINUTES if asked.minutes is None else asked.minutes
    sessions = sessions_of(asked.sessions, minutes, asked.seed)
    limits = setup.limits
    needed = working_set(sessions, limits.block_size)
    if asked.cache_share is not None:
        limits = replace(limits, num_blocks=max(int(needed * asked.cache_share),
                                                -(-limits.max_model_len // limits.block_size)))
    longest = max(turn.num_prompt + turn.output.num_tokens for one in sessions for turn in one.turns)
    if objection := limits.objection(longest - 1, 1):
        raise ValueError(f"--sessions: {objection}")
    found = compare(sessions, replace(setup, limits=limits, max_queued=(MAX_QUEUED, MAX_QUEUED)))
    requests = sum(len(one.turns) for one in sessions)
    table = Table(title=plain(f"simulated on {about}: {requests:,} requests of {len(sessions):,} sessions, and a cache "
                              f"of {limits.num_blocks:,} blocks, where all have {needed:,}"),
                  title_justify="left", header_style="bold")
    for head in ("", *OF_SESSIONS.values()):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for name, one in found.items():
        table.add_row(name, *(
            "–" if figure not in one else f"{one[figure]:.2%}" if figure == "found_share" else
            f"{one[figure]:,}" if figure == "computed" else duration(one[figure]) for figure in OF_SESSIONS))
    console = Console(highlight=False)
    console.print(table)
    console.print(plain("prompt tokens found and computed, and means; hindsight: a bound on what any order finds"))
    _write(asked.json, {"machine": about, "seed": asked.seed, "sessions": asked.sessions, "minutes": minutes,
                        "num_blocks": limits.num_blocks, "needed_blocks": needed, "found": found})
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
            raise ValueError(f"{name} is not for servers with roles: leave it out with --prefill-replicas")
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
        read_file(asked.log), changes, _objectives(asked), asked.request, dict(asked.retain))
    console = Console(highlight=False)
    for name, found in answer["groups"].items():
        worth = answer["verdicts"][name]
        console.print(plain(worth["text"], "" if worth["is_reliable"] else "bold red"))
        console.print(_table(name, {run.replace("_", " "): Figures(**one) for run, one in found.items()}, worth))
    console.print(plain(f"{answer['requests']} requests within {duration(answer['seconds'])}; error: replayed under "
                        "the settings in force, against measured"))
    console.print(plain(answer["prompts_text"]))
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
    given = {"ttft_ms": asked.ttft_ms, "tpot_ms": asked.tpot_ms, "request_id": asked.request or None,
             "retain": dict(asked.retain) or None}
    body = {"changes": changes} | {name: value for name, value in given.items() if value is not None}
    headers = {"Content-Type": "application/json"}
    if asked.api_key:
        headers["Authorization"] = f"Bearer {asked.api_key}"
    named = f"?{urllib.parse.urlencode({'replica': asked.replica})}" if asked.replica else ""
    request = urllib.request.Request(f"{asked.url.rstrip('/')}/what_if{named}", json.dumps(body).encode(), headers)
    waiting = Console(stderr=True).status("The server replays its last minutes while it streams: ten seconds")
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
        from slotwise.measure.bench.results import write_json

        write_json(path, {"version": 1, **result})
        print(f"\nwritten to {path}")


ROUNDS = 10
NAMES = {"ttft_p": "ttft", "tpot_p": "tpot"}
UNITS = {"ms": 1e-3, "s": 1.0}
SLOTS, TOKENS, STALLS = (8, 16, 32, 64, 128), (256, 512, 1024, 2048), (30.0, 70.0, 150.0)


def _add_searches(commands: Commands) -> None:
    capacity = add_command(commands, "capacity", "find how many replicas a workload needs, by simulation", run_capacity)
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


def run_capacity(asked: argparse.Namespace) -> int:
    setup, about = setup_of_machine(asked)
    workload, target = workload_of(asked, WORKLOAD), asked.slo
    replicas = fewest(workload, setup, target)
    console = Console(highlight=False)
    bounds = ""
    if asked.bootstrap:
        low, high = ["more than any number" if number is None else number
                     for number in interval(workload, setup, target, replicas, asked.bootstrap)]
        bounds = f" ({low} to {high} for nine tenths of {asked.bootstrap} resampled workloads)"
    console.print(plain(f"{replicas} replicas of {about}{bounds}"))
    numbers = [number for number in (replicas - 1, replicas, replicas + 1) if number]
    console.print(_loads_table("one fewer, one more", [at_load(workload, setup, target, number) for number in numbers]))
    loads = [at_load(workload, setup, target, replicas, load) for load in LOADS]
    console.print(_loads_table(f"{replicas} replicas at other loads", loads))
    knee = max((one for one in loads if one.met), key=lambda one: one.load, default=None)
    if asked.plot:
        _draw(asked.plot, f"{replicas} replicas of {about.partition(' (')[0]}", loads, knee)
    console.print(plain("the objective is met at none of these loads" if knee is None else
                        f"the objective is met up to {knee.load:g} of the load, {knee.offered:.3g} requests a second"))
    return 0


def _draw(path: str, title: str, loads: Sequence[LoadPoint], knee: LoadPoint | None) -> None:
    from slotwise.measure.bench.report.plots import knee_plot

    points = {one: (one.offered, one.figures.goodput) for one in loads}
    write_output(path, knee_plot(title, list(points.values()), points.get(knee) if knee else None).encode())


def _loads_table(title: str, loads: Sequence[LoadPoint]) -> Table:
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
        lines = [f"{name.replace('_', '-')}: {0 if value is None else value}\n"  # 0: no limit
                 for name, value in best.settings.items()]
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
