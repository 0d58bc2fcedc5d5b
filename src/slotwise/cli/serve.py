"""slotwise serve: the HTTP service."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from slotwise import builtin, child
from slotwise.cli import layers
from slotwise.cli.interrupts import ending_at_once
from slotwise.cli.lora_options import add_lora_options, lora_modules, lora_settings
from slotwise.cli.network_options import add_network_options, network_settings
from slotwise.cli.numbers import Number, Size
from slotwise.cli.options import (
    BUILTIN_NAME,
    Commands,
    add_command,
    add_engine_options,
    add_generation_options,
    add_overwrite_option,
    engine_settings,
    input_file,
    json_object,
)
from slotwise.cli.parser import Parser
from slotwise.cli.transfer_option import add_transfer_option, transfer_secret_of
from slotwise.cli.vllm_flags import add_vllm_flags, notices
from slotwise.compose.launch import AUTO, CORES, MOST_PROCESSORS, NONE, environment, numbers, read_processors
from slotwise.core.settings import real, whole
from slotwise.engine.admission_control import PATIENCE
from slotwise.engine.config import DAY, EngineConfig
from slotwise.engine.heartbeat import ENGINE_TIMEOUT, SHORTEST_TIMEOUT
from slotwise.errors import printable
from slotwise.host import processors
from slotwise.model.checkpoint import locate
from slotwise.observe.lines import FORMATS, TEXT, final
from slotwise.server.parsers.output_format import REASONING_ALIASES, REASONING_PARSERS, TOOL_ALIASES, TOOL_PARSERS
from slotwise.speculation.settings import PREDICTION, Speculation

if TYPE_CHECKING:
    from slotwise.server.tiers import ServedTier


def add(commands: Commands) -> None:
    add_options(add_command(commands, "serve", "serve a model over HTTP, with OpenAI's API", run))


def add_options(serve: Parser) -> None:
    """The model, and all options of a server."""
    serve.fill = layers.fill
    serve.add_argument("model_tag", nargs="?", metavar="MODEL",
                       help="a checkpoint's folder, a GGUF file or a hub id (default: the built-in model)")
    serve.add_argument("--model", metavar="MODEL", help="the same as an option")
    serve.add_argument("--config", type=input_file, metavar="FILE",
                       help="settings in YAML: options without their dashes, as in `max-num-seqs: 16`; the command "
                       "line and the environment ($SLOTWISE_MAX_NUM_SEQS) win")
    _server_options(serve)
    add_lora_options(serve)
    add_transfer_option(serve)
    add_network_options(serve)
    add_engine_options(serve)
    add_vllm_flags(serve)
    serve.set_defaults(speculative_config=Speculation(PREDICTION))


def _server_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("server")
    group.add_argument("--host", type=_host, default="127.0.0.1",
                       help="address to listen on (default: this machine only)")
    group.add_argument("--port", type=Number(whole(0, 65_535)), default=8000,
                       help="port to listen on; 0: any free port (default: 8000)")
    group.add_argument("--api-key", action="append", default=[], type=_key, metavar="KEY",
                       help="a key that clients send as a bearer token; repeatable; keys share no cached prefixes "
                       "(default: those in $SLOTWISE_API_KEY, comma separated)")
    group.add_argument("--admin-api-key", type=_key, metavar="KEY",
                       help="the only key that may use /admin (default: $SLOTWISE_ADMIN_API_KEY; without one, clients "
                       "on this machine may where no key is needed, and else no client)")
    group.add_argument("--tiers", type=input_file, metavar="FILE",
                       help="classes of service, in TOML: objectives, shares, queues, keys and their quotas; "
                       "docs/tiers.md tells all")
    _model_options(group)
    _limit_options(group)
    _placement_options(group)
    _observing_options(group)


def _model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--served-model-name", action="extend", nargs="+", default=[], metavar="NAME",
                       help="what clients call the model, by any of several names; responses and metrics have the "
                       "first (default: the model as it is given here)")
    group.add_argument("--chat-template", type=input_file, metavar="FILE",
                       help="a Jinja file instead of the model's own template")
    group.add_argument("--enable-auto-tool-choice", action=argparse.BooleanOptionalAction, default=None,
                       help="answers may call the tools that a request lists (default: where it is known how the model "
                       "calls them)")
    group.add_argument("--tool-call-parser", choices=(*TOOL_PARSERS, *TOOL_ALIASES), default="", metavar="NAME",
                       help=f"how the model calls tools: {', '.join(sorted(TOOL_PARSERS))} (default: as its chat "
                       "template tells)")
    group.add_argument("--reasoning-parser", choices=(*REASONING_PARSERS, *REASONING_ALIASES), default="",
                       metavar="NAME", help="how the model's reasoning is told from its answer: "
                       f"{', '.join(sorted(REASONING_PARSERS))} (default: it is part of the answer)")
    group.add_argument("--trust-request-chat-template", action="store_true",
                       help="render chat templates that requests bring (default: refuse them with 400)")
    add_generation_options(group, bound="; its max_new_tokens bounds every request")
    group.add_argument("--pooler-config", type=json_object, default={}, metavar="JSON",
                       help="how /v1/embeddings makes vectors, as {\"pooling_type\": \"MEAN\", \"normalize\": true}; "
                       "the type is LAST or MEAN (default: as the checkpoint's 1_Pooling/config.json says, else LAST)")


def _limit_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-num-queued-reqs", type=Number(whole(1)), metavar="N",
                       help="requests that may wait for a first slot, 8/9 of them of one key; more get 503 "
                       f"(default: what should start within {PATIENCE:g} s, at the measured rate)")
    group.add_argument("--max-num-queued-tokens", type=Size(whole(1)), metavar="TOKENS",
                       help="prompt tokens of requests that wait for a first slot, likewise")
    group.add_argument("--queue-timeout", type=Number(real(0, DAY)), default=0.0, metavar="SECONDS",
                       help="a request that has waited so long for its first slot gets 504 (default: no limit)")
    group.add_argument("--engine-timeout", type=Number(real(SHORTEST_TIMEOUT, DAY)), default=ENGINE_TIMEOUT,
                       metavar="SECONDS",
                       help="silence after which the engine process is killed and replaced; after half of it "
                            f"/health is 503 (default: {ENGINE_TIMEOUT:g})")
    group.add_argument("--shutdown-timeout", type=Number(real(0, DAY)), default=30.0, metavar="SECONDS",
                       help="time that running requests have to end after SIGTERM, SIGHUP or Ctrl-C (default: 30)")
    group.add_argument("--stream-interval", type=Size(whole(1, 65_536)), default=1, metavar="TOKENS",
                       help="tokens of each event of a stream (default: 1)")


def _placement_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cpu-threads", type=Number(whole(1, MOST_PROCESSORS)), metavar="N",
                       help="compute threads of the engine (default: one for each place of --cpu-bind)")
    group.add_argument("--cpu-bind", type=_bind, default=AUTO, metavar="PLACES",
                       help="where they run: auto, each on a processor of its own; cores, each on a physical core, "
                       "node by node; none, anywhere; or a list of processors, as 0-3,8 (default: auto)")


def _observing_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--event-log", default="", metavar="FILE",
                       help="write the event log here, prompts included: up to 1 kB for a step of 16 rows (default: "
                       "only the latest entries are kept, in memory)")
    add_overwrite_option(group)
    group.add_argument("--otlp-traces-endpoint", default="", metavar="URL",
                       help="send a span for each request and its stages to this collector, by OTLP over HTTP "
                       "(http://127.0.0.1:4318/v1/traces; needs slotwise[otel])")
    group.add_argument("--log-format", choices=FORMATS, default=TEXT,
                       help="lines on stderr: text, or a JSON object each (default: text)")
    group.add_argument("--disable-log-stats", action="store_true",
                       help="leave out the line about the load, every 10 s while there is some")
    group.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction, default=False,
                       help="log a line for each request to generate: its id, tokens, status and times, no text")
    group.add_argument("--max-log-len", type=Number(whole(0, 10_000)), default=0, metavar="CHARACTERS",
                       help="with --enable-log-requests, that many characters of each request's prompts (default: 0)")
    group.add_argument("--access-log", action=argparse.BooleanOptionalAction, default=False,
                       help="log a line for each HTTP exchange: method, path, status and time")
    group.add_argument("--vllm-metrics", action="store_true",
                       help="/metrics has vLLM's metrics under vLLM's names, too, for its dashboards and alert rules")


def _host(text: str) -> str:
    """The type of an address.  An empty one, as of an unset variable, would mean all addresses of this machine."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"must be a name or an address, and 0.0.0.0 for all of this machine, not {printable(text)!r:.40}")
    return text


def _bind(text: str) -> str:
    """The type of `--cpu-bind`."""
    try:
        if text not in (AUTO, CORES, NONE):
            numbers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (or auto, cores, none)") from None
    return text


def _key(text: str) -> str:
    from slotwise.server.api_keys import key_of

    try:
        return key_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _from_environment(name: str) -> tuple[str, ...]:
    """The keys of a variable; () where it is not set.

    Raises:
        ValueError: it is set and holds no key, so that a server meant to be closed would be open.
    """
    from slotwise.server.api_keys import key_of

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


def api_keys_of(given: list[str]) -> tuple[str, ...]:
    """The keys of the command line, else those of the environment.  Raises ValueError like `_from_environment`."""
    return tuple(given) or _from_environment("SLOTWISE_API_KEY")


def admin_key_of(given: str | None) -> str:
    """The admin key, "" where there is none.  Raises ValueError like `_from_environment`, and for more than one."""
    keys = (given,) if given else _from_environment("SLOTWISE_ADMIN_API_KEY")
    if len(keys) > 1:
        raise ValueError("SLOTWISE_ADMIN_API_KEY holds a comma: there is one admin key")
    return keys[0] if keys else ""


def tiers_of(asked: argparse.Namespace) -> tuple[ServedTier, ...]:
    """The tiers of the file.  Raises ValueError, OSError: one line that says what is wrong with it."""
    if not asked.tiers:
        return ()
    from slotwise.server.tiers import load_tiers, objection

    tiers = load_tiers(asked.tiers, asked.max_num_seqs, os.environ)
    for served in tiers:
        child.keep_secret(served.variable)
    if wrong := objection(tiers, api_keys_of(asked.api_key)):
        raise ValueError(f"{asked.tiers}: {wrong}")
    return tiers


def model_of(asked: argparse.Namespace) -> str:
    """The model asked for, "" for the built-in one.

    Raises:
        ValueError: there are two, or one stands where --served-model-name took it for a name.
    """
    given, option = asked.model_tag, asked.model
    if given and option and given != option:
        raise ValueError(f"{given} and --model {option}: a server has one model")
    if not (given or option):
        for name in asked.served_model_name[1:]:
            if "/" in name or os.path.isdir(name):
                raise ValueError(f"--served-model-name has taken {name} for a further name: put the model before it, "
                                 "or give it with --model")
    return given or option or ""


def run(asked: argparse.Namespace) -> int:
    with ending_at_once(partial(final, asked.log_format)):  # until the server takes signals itself
        return _run(asked)


def _run(asked: argparse.Namespace) -> int:
    from slotwise.compose.launch import hold_off, launch_engine
    from slotwise.compose.model_defaults import read_defaults, read_pooling
    from slotwise.observe.log_file import check

    hold_off()
    tiers, api_keys, admin_key = tiers_of(asked), api_keys_of(asked.api_key), admin_key_of(asked.admin_api_key)
    model, network, lines = model_of(asked), network_of(asked), notices(asked)
    names = tuple(dict.fromkeys(asked.served_model_name or [model or BUILTIN_NAME]))
    adapters, modules = lora_settings(asked), lora_modules(asked, names)
    transfer = asked.kv_transfer_config
    if asked.kv_transfer_secret_file and transfer is None:
        raise ValueError("--kv-transfer-secret-file has no effect without --kv-transfer-config: leave it out")
    secret = transfer_secret_of(asked) if transfer is not None else ""
    if asked.max_log_len and not asked.enable_log_requests:
        lines.append("--max-log-len has no effect without --enable-log-requests")
    config = EngineConfig.of(
        model=str(locate(model or builtin.path())), tiers=tuple([served.tier for served in tiers]),
        generation_config=asked.generation_config, kv_transfer_config=transfer and replace(transfer, secret=secret),
        **engine_settings(asked), **adapters)
    defaults = read_defaults(config, asked.override_generation_config)
    pooling = read_pooling(config.model, asked.pooler_config)
    if asked.event_log:
        check(asked.event_log, overwrite=asked.overwrite_event_log)
    variables = environment(asked.cpu_threads, asked.cpu_bind, read_processors(processors()))
    engine = launch_engine(config, asked.log_format, variables)  # it loads while this process imports the rest

    from slotwise.compose.api_server import ModelOptions, run_server
    from slotwise.server.settings import ServerSettings

    settings = ServerSettings(
        served_model_name=names[0], more_model_names=names[1:], lora_modules=modules,
        api_keys=api_keys, admin_api_key=admin_key, tiers=tiers,
        max_num_queued_reqs=asked.max_num_queued_reqs, max_num_queued_tokens=asked.max_num_queued_tokens,
        queue_timeout=asked.queue_timeout, engine_timeout=asked.engine_timeout,
        shutdown_timeout=asked.shutdown_timeout, stream_interval=asked.stream_interval,
        event_log=asked.event_log, overwrite_event_log=asked.overwrite_event_log,
        otlp_traces_endpoint=asked.otlp_traces_endpoint, log_format=asked.log_format,
        log_stats=not asked.disable_log_stats, log_requests=asked.enable_log_requests, access_log=asked.access_log,
        max_log_len=asked.max_log_len, vllm_metrics=asked.vllm_metrics, seed=asked.seed, notices=tuple(lines),
        tool_call_parser=asked.tool_call_parser, enable_auto_tool_choice=asked.enable_auto_tool_choice,
        reasoning_parser=asked.reasoning_parser, engine_environment=variables,
        trust_request_chat_template=asked.trust_request_chat_template, sampling_defaults=defaults,
        pooling_defaults=pooling, kv_transfer_secret=secret, **network)
    options = ModelOptions(tuple(dict.fromkeys(asked.served_model_name)), asked.chat_template,
                           asked.override_generation_config, asked.pooler_config)
    return run_server(config, settings, (asked.host, asked.port), options, engine)


def network_of(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings about the network.

    Raises:
        ValueError: they contradict each other, or TLS cannot be served with these files.
    """
    network = network_settings(asked)
    if network["ssl_certfile"]:
        from slotwise.server.listener import context_of

        context_of(**{name: path for name, path in network.items() if name.startswith("ssl_")})
    return network
