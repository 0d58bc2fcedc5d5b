"""slotwise scale: several replicas of a model behind one address."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotwise.api.limits.server_settings import ServerSettings
from slotwise.cli import serve_command
from slotwise.cli.options_of_settings import Commands, Number, add_command, given_settings, option_of, reader
from slotwise.cli.parser import Parser
from slotwise.compose.launch import AUTO, read_processors
from slotwise.core.routing.fleet import MAX_WAIT
from slotwise.core.routing.routers import ROUTERS
from slotwise.core.setting_fields import real, whole
from slotwise.core.transfer.kv_transfer_config import SECRET, secret_of
from slotwise.engine.config import DAY
from slotwise.fleet.door import MAX_REPLICAS
from slotwise.fleet.replicas import checked
from slotwise.platform.host import processors

SECRET_BYTES = 32  # random ones, of the transfer secret for replicas with roles
MEMORY = 0.6  # of the machine's, for the weights, steps and caches of all replicas together
OF_THE_DOOR = frozenset((  # options of `slotwise serve` that mean something without a server of one's own
    "host", "port", "api_key", "admin_api_key", "log_format", "shutdown_timeout", "access_log", "seed",
    "served_model_name", "config", "allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers",
    "allow_credentials", "ui", "root_path", "kv_transfer_secret_file"))
NOT_SHARED = {  # options that several replicas of a machine cannot have in common
    "event_log": "each replica would write it", "cpu_threads": "the processors are divided among the replicas",
    "kv_disk": "one engine uses a folder at a time",
    "ssl_certfile": "let a proxy before it speak TLS"}


def add(commands: Commands) -> None:
    command = add_command(commands, "scale", "serve a model by several replicas behind one address", run)
    command.keeps_rest = True
    command.usage = "slotwise scale [MODEL] [--replicas N] [options of slotwise serve]"
    command.epilog = "Every other argument is one of `slotwise serve`, and each replica gets it."
    command.add_argument("--replicas", type=Number(whole(1, MAX_REPLICAS)), default=None, metavar="N",
                         help="server processes on this machine, which share its processors and memory (default: 2)")
    command.add_argument("--prefill-replicas", type=Number(whole(1, MAX_REPLICAS)), default=None, metavar="N",
                         help="in place of --replicas: processes that compute prompts for those of --decode-replicas, "
                         "whose steps then have no long prompts: docs/disaggregation.md")
    command.add_argument("--decode-replicas", type=Number(whole(1, MAX_REPLICAS)), default=None, metavar="N",
                         help="processes that answer, together with --prefill-replicas (default: 1)")
    command.add_argument("--replica-url", action="append", default=[], type=reader(checked), metavar="URL", dest="urls",
                         help="in place of processes: replicas at this address, as http://HOST:8000; a name that means "
                         "several hosts stands for all of them; repeatable")
    command.add_argument("--router", choices=tuple(ROUTERS), default="product",
                         help="product: least new prompt tokens times batch; the others are baselines: "
                         "docs/replicas.md (default: product)")
    command.add_argument("--max-wait", type=Number(real(0.001, DAY)), default=MAX_WAIT, metavar="SECONDS",
                         help="predicted time to the first output beyond which a request gets 503 and a Retry-After "
                         f"(default: {MAX_WAIT:g})")


def run(asked: argparse.Namespace) -> int:
    from slotwise.fleet.run import Scaling, run_scale

    parser = Parser(prog="slotwise scale", add_help=False)
    serve_command.add_options(parser)
    served = parser.parse_args(asked.rest)
    vars(asked).update({**vars(served), **vars(asked), "typed": {**served.typed, **asked.typed}})  # for messages
    secret = secret_of(served.kv_transfer_secret_file or "", os.environ)
    if asked.urls:
        _check_addresses(asked, parser)
        launch, number = None, 0
    else:
        number, of_roles = _numbers(asked, served)
        _check_shared(served)
        secret = secret or (secrets.token_hex(SECRET_BYTES) if of_roles else "")
        launch = _launcher(asked.rest, served, number, of_roles, {SECRET: secret} if of_roles else {})
    given = {name: value for name, value in given_settings(served, ServerSettings).items() if name in OF_THE_DOOR}
    settings = replace(serve_command.server_settings(served, given), kv_transfer_secret=secret)
    settings = serve_command.with_names(settings, served, serve_command.found_for(served, []))  # replicas say the rest
    scaling = Scaling(launch, number, asked.urls, asked.router, asked.max_wait, served.seed,
                      asked.prefill_replicas or 0)
    return run_scale(settings, scaling)


def _check_addresses(asked: argparse.Namespace, parser: Parser) -> None:
    """Raises ValueError for an option of processes, of which this command starts none."""
    for name in ("replicas", "prefill_replicas", "decode_replicas"):
        if getattr(asked, name) is not None:
            raise ValueError(f"{option_of(name)} is for processes that this command starts: with "
                             "--replica-url others do")
    given, _ = parser.given(asked.rest)
    for name, value in vars(given).items():
        if value is not None and name not in OF_THE_DOOR:
            option = "MODEL" if name == "model_tag" else option_of(name)
            raise ValueError(f"{option} is for replicas that this command starts: start those at --replica-url with it")


def _check_shared(served: argparse.Namespace) -> None:
    """Raises ValueError for an option that replicas of one machine cannot share."""
    for name, why in NOT_SHARED.items():
        if getattr(served, name):
            raise ValueError(f"{option_of(name)} is not for replicas: {why}")
    if served.cpu_bind != AUTO:
        raise ValueError(f"--cpu-bind is not for replicas: {NOT_SHARED['cpu_threads']}")
    if served.kv_transfer_config is not None and served.kv_transfer_config.is_producer:
        raise ValueError("--kv-transfer-config is not for replicas where they send prompts: all would listen at one "
                         "address; use --prefill-replicas")
    if served.device == "cuda":
        raise ValueError("--device cuda: start a `slotwise serve` for each GPU, and name them with --replica-url")


def _numbers(asked: argparse.Namespace, served: argparse.Namespace) -> tuple[int, list[list[str]]]:
    """Returns the number of processes, and the options of each role that they have; [] where all are alike.

    Raises:
        ValueError: the options contradict each other.
    """
    if asked.prefill_replicas is None:
        if asked.decode_replicas is not None:
            raise ValueError("--decode-replicas goes with --prefill-replicas: give both")
        return 2 if asked.replicas is None else asked.replicas, []
    if asked.replicas is not None:
        raise ValueError("--replicas is for replicas without roles: leave it out with --prefill-replicas")
    if served.kv_transfer_config is not None:
        raise ValueError("--kv-transfer-config is not for --prefill-replicas, which sets it for each process")
    from slotwise.fleet.replicas import roles

    number = asked.prefill_replicas + (asked.decode_replicas or 1)
    if number > MAX_REPLICAS:
        raise ValueError(f"--prefill-replicas and --decode-replicas: at most {MAX_REPLICAS} together, not {number}")
    return number, roles(asked.prefill_replicas, number)


def _launcher(rest: Sequence[str], served: argparse.Namespace, number: int, of_roles: Sequence[Sequence[str]],
              variables: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns what starts the process of a replica, given its name, a number.

    Args:
        variables: of its environment.

    Replicas beyond `number`, added later, take the places of the first ones, too.
    """
    from slotwise.fleet.replicas import ServeProcess, shares

    found = read_processors(processors())
    places = [one.number for one in sorted(found, key=lambda one: (one.node, min(one.siblings), one.number))]
    bound = shares(places or sorted(processors()) if sys.platform == "linux" else [], number)
    memory = [] if number == 1 or served.kv_cache_memory is not None else [
        "--gpu-memory-utilization", f"{(served.gpu_memory_utilization or MEMORY) / number:.4f}"]

    def launch(name: str) -> ServeProcess:
        place = int(name) % number
        return ServeProcess(name, [*rest, *bound[place], *memory, *(of_roles[place] if of_roles else [])], variables)

    return launch
