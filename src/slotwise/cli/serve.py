"""slotwise serve: the HTTP service."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import TYPE_CHECKING

from slotwise import builtin, child
from slotwise.cli.interrupts import ending_at_once
from slotwise.cli.numbers import Number
from slotwise.cli.options import (
    BUILTIN_NAME,
    Commands,
    add_command,
    add_engine_options,
    add_generation_options,
    add_overwrite_option,
    engine_settings,
    input_file,
)
from slotwise.core.ranges import real, whole
from slotwise.engine.admission_control import PATIENCE
from slotwise.engine.config import DAY, EngineConfig
from slotwise.engine.heartbeat import ENGINE_TIMEOUT, SHORTEST_TIMEOUT
from slotwise.model.locate import locate
from slotwise.observe.lines import FORMATS, TEXT

if TYPE_CHECKING:
    from slotwise.server.tiers import ServedTier


def add(commands: Commands) -> None:
    serve = add_command(commands, "serve", "serve a model over HTTP, with OpenAI's API", run)
    serve.add_argument("model", nargs="?", help="a checkpoint's folder or a hub id (default: the built-in model)")
    _server_options(serve)
    add_engine_options(serve)


def _server_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    group.add_argument("--port", type=Number(whole(0, 65_535)), default=8000,
                       help="port to listen on; 0: any free port (default: 8000)")
    group.add_argument("--api-key", action="append", default=[], type=_key, metavar="KEY",
                       help="a key that clients send as a bearer token; repeatable; keys share no cached prefixes "
                       "(default: those in $SLOTWISE_API_KEY, comma separated)")
    group.add_argument("--admin-api-key", type=_key, metavar="KEY",
                       help="the only key that may use /admin (default: $SLOTWISE_ADMIN_API_KEY; without one, any "
                       "key may)")
    group.add_argument("--tiers", type=input_file, metavar="FILE",
                       help="classes of service, in TOML: objectives, shares, queues, keys and their quotas; "
                       "docs/tiers.md tells all")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    group.add_argument("--chat-template", type=input_file, metavar="FILE",
                       help="a Jinja file instead of the model's own template")
    group.add_argument("--trust-request-chat-template", action="store_true",
                       help="render chat templates that requests bring (default: refuse them with 400)")
    add_generation_options(group, bound="; its max_new_tokens bounds every request")
    group.add_argument("--max-num-queued-reqs", type=Number(whole(1)), metavar="N",
                       help="requests that may wait for a first slot, 8/9 of them of one key; more get 503 "
                       f"(default: what should start within {PATIENCE:g} s, at the measured rate)")
    group.add_argument("--max-num-queued-tokens", type=Number(whole(1)), metavar="TOKENS",
                       help="prompt tokens of requests that wait for a first slot, likewise")
    group.add_argument("--queue-timeout", type=Number(real(0, DAY)), default=0.0, metavar="SECONDS",
                       help="a request that has waited so long for its first slot gets 504 (default: no limit)")
    group.add_argument("--engine-timeout", type=Number(real(SHORTEST_TIMEOUT, DAY)), default=ENGINE_TIMEOUT,
                       metavar="SECONDS",
                       help="silence after which the engine process is killed and replaced; after half of it "
                            f"/health is 503 (default: {ENGINE_TIMEOUT:g})")
    group.add_argument("--shutdown-timeout", type=Number(real(0, DAY)), default=30.0, metavar="SECONDS",
                       help="time that running requests have to end after SIGTERM (default: 30)")
    group.add_argument("--stream-interval", type=Number(whole(1, 65_536)), default=1, metavar="TOKENS",
                       help="tokens of each event of a stream (default: 1)")
    group.add_argument("--event-log", default="", metavar="FILE",
                       help="write the event log here, prompts included: up to 1 kB for a step of 16 rows (default: "
                       "only the latest entries are kept, in memory)")
    add_overwrite_option(group)
    group.add_argument("--otlp-traces-endpoint", default="", metavar="URL",
                       help="send a span for each request and its stages to this collector, by OTLP over HTTP "
                       "(http://127.0.0.1:4318/v1/traces; needs slotwise[otel])")
    group.add_argument("--log-format", choices=FORMATS, default=TEXT,
                       help="lines on stderr: text, or a JSON object each (default: text)")
    _browser_options(group)


def _browser_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--allowed-hosts", action="extend", default=[], type=_host_names, metavar="NAME",
                       help="names of this server that the Host header may have; on a loopback address "
                       "without keys all but localhost and its addresses are refused; repeatable, or a JSON list; "
                       "* allows any")
    group.add_argument("--allowed-origins", action="extend", default=[], type=_origins, metavar="ORIGIN",
                       help="sites whose pages may use this server from a browser, as https://example.com; "
                       "repeatable, or a JSON list; * allows any (default: only pages of this server)")


def _listed(text: str) -> list[str]:
    """One value, or several as a JSON list."""
    if not text.startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except ValueError:
        return [text]  # an address in brackets
    if not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f"must be a JSON list of strings, not {text}")
    return list(values)


def _host_names(text: str) -> list[str]:
    names = _listed(text)
    for name in names:
        if not re.fullmatch(r"\*|\[[0-9A-Fa-f:.]+\]|[\w.-]+", name):
            raise argparse.ArgumentTypeError(f"must be host names without ports, not {name!r}")
    return names


def _origins(text: str) -> list[str]:
    origins = _listed(text)
    for origin in origins:
        if not re.fullmatch(r"\*|null|[A-Za-z][\w+.-]*://[^/\s@]+", origin):
            raise argparse.ArgumentTypeError(f"must be origins like https://example.com:8443, not {origin!r}")
    return origins


def _key(text: str) -> str:
    from slotwise.server.keys import key_of

    try:
        return key_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _from_environment(name: str) -> tuple[str, ...]:
    """The keys of a variable; () where it is not set.

    Raises:
        ValueError: it is set and holds no key, so that a server meant to be closed would be open.
    """
    from slotwise.server.keys import key_of

    if name not in os.environ:
        return ()
    keys = list(filter(None, map(str.strip, os.environ[name].split(","))))
    try:
        if keys:
            return tuple(map(key_of, keys))
        what = "no key"
    except ValueError:
        what = "a key with characters that cannot be sent"
    raise ValueError(f"{name} is set, but holds {what}: set it to a key, or unset it to serve without one")


def _keys(given: list[str]) -> tuple[str, ...]:
    """The keys of the command line, else those of the environment.  Raises ValueError like `_from_environment`."""
    return tuple(given) or _from_environment("SLOTWISE_API_KEY")


def _admin_key(given: str | None) -> str:
    """The admin key, "" where there is none.  Raises ValueError like `_from_environment`, and for more than one."""
    keys = (given,) if given else _from_environment("SLOTWISE_ADMIN_API_KEY")
    if len(keys) > 1:
        raise ValueError("SLOTWISE_ADMIN_API_KEY holds a comma: there is one admin key")
    return keys[0] if keys else ""


def _tiers(asked: argparse.Namespace) -> tuple[ServedTier, ...]:
    """The tiers of the file.  Raises ValueError, OSError: one line that says what is wrong with it."""
    if not asked.tiers:
        return ()
    from slotwise.server.tiers import load_tiers, objection

    tiers = load_tiers(asked.tiers, asked.max_num_seqs, os.environ)
    for served in tiers:
        child.keep_secret(served.variable)
    if wrong := objection(tiers, _keys(asked.api_key)):
        raise ValueError(f"{asked.tiers}: {wrong}")
    return tiers


def run(asked: argparse.Namespace) -> int:
    with ending_at_once():  # until the server takes signals itself
        return _run(asked)


def _run(asked: argparse.Namespace) -> int:
    from slotwise.compose.garbage import hold_off
    from slotwise.compose.launch import launch_engine
    from slotwise.compose.sampling_defaults import read_defaults
    from slotwise.observe.log_file import check

    hold_off()
    tiers, api_keys, admin_key = _tiers(asked), _keys(asked.api_key), _admin_key(asked.admin_api_key)
    config = EngineConfig.of(
        model=str(locate(asked.model or builtin.path())), tiers=tuple([served.tier for served in tiers]),
        generation_config=asked.generation_config, **engine_settings(asked))
    defaults = read_defaults(config, asked.override_generation_config)
    if asked.event_log:
        check(asked.event_log, overwrite=asked.overwrite_event_log)
    engine = launch_engine(config, asked.log_format)  # it loads while this process imports the rest

    from slotwise.compose.server import run_server
    from slotwise.server.settings import ServerSettings

    settings = ServerSettings(
        served_model_name=asked.served_model_name or asked.model or BUILTIN_NAME, api_keys=api_keys,
        admin_api_key=admin_key, tiers=tiers,
        max_num_queued_reqs=asked.max_num_queued_reqs, max_num_queued_tokens=asked.max_num_queued_tokens,
        queue_timeout=asked.queue_timeout, engine_timeout=asked.engine_timeout,
        shutdown_timeout=asked.shutdown_timeout, stream_interval=asked.stream_interval,
        event_log=asked.event_log, overwrite_event_log=asked.overwrite_event_log,
        otlp_traces_endpoint=asked.otlp_traces_endpoint, log_format=asked.log_format,
        host=asked.host, allowed_hosts=tuple(asked.allowed_hosts), allowed_origins=tuple(asked.allowed_origins),
        seed=asked.seed, trust_request_chat_template=asked.trust_request_chat_template, sampling_defaults=defaults)
    return run_server(config, settings, (asked.host, asked.port), asked.chat_template, engine)
