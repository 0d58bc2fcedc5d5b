"""slotwise serve: the HTTP service."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotwise.api.limits.server_settings import MODEL, LoraModule, ServerSettings
from slotwise.cli.options_of_settings import (
    MODEL_HELP,
    Commands,
    Number,
    add_command,
    add_engine_options,
    add_generation_options,
    add_settings,
    add_vllm_flags,
    engine_settings,
    given_settings,
    group_of,
    input_file,
    reader,
)
from slotwise.cli.parser import Parser, fill, mark_common
from slotwise.cli.process import ending_at_once
from slotwise.cli.pull import find_model
from slotwise.compat.vllm import notices
from slotwise.compose.launch import AUTO, CORES, MOST_PROCESSORS, NONE, environment, numbers, read_processors
from slotwise.compute.model.model_registry import BUILTIN, FoundModel
from slotwise.compute.model.published_models import PUBLISHED, DownloadError
from slotwise.core.scheduler_limits import ADAPTERS
from slotwise.core.setting_fields import make, settings_of, whole
from slotwise.core.speculation.speculation_settings import PREDICTION, Speculation
from slotwise.core.transfer.kv_transfer_config import SECRET, secret_of
from slotwise.engine.config import TRANSFERS, EngineConfig, ModelOptions
from slotwise.errors import described, printable
from slotwise.observe.lines import final
from slotwise.platform import child
from slotwise.platform.host import processors

if TYPE_CHECKING:
    from slotwise.api.limits.tiers import ServedTier


SERVER = "server"  # a heading


def add(commands: Commands) -> None:
    add_options(add_command(commands, "serve", "serve a model over HTTP, with OpenAI's API", run))


def add_options(serve: Parser) -> None:
    """The model, and all options of a server."""
    serve.fill = fill
    mark_common(serve.add_argument("model_tag", nargs="?", metavar="MODEL", help=MODEL_HELP))
    serve.add_argument("--model", metavar="MODEL", help="the model, given as an option")
    serve.add_argument("--or-builtin", action="store_true",
                       help="serve the built-in model where the model is a name that `slotwise pull` lists, and the "
                       "package registry does not give it")
    serve.add_argument("--config", type=input_file, metavar="FILE",
                       help="settings in YAML: options without their dashes, as in `max-num-seqs: 16`; the command "
                       "line and the environment ($SLOTWISE_MAX_NUM_SEQS) win")
    add_settings(serve, ServerSettings, SERVER)
    group_of(serve, SERVER).add_argument(
        "--tiers", type=input_file, metavar="FILE",
        help="classes of service, in TOML: objectives, shares, queues, keys and their quotas; see docs/tiers.md")
    add_settings(serve, ModelOptions, MODEL, ("served_model_name", "chat_template", "pooler_config"))
    add_generation_options(serve, bound="; its max_new_tokens bounds every request")
    _placement_options(serve.add_argument_group("processors"))
    add_settings(serve, EngineConfig, "engine", [
        name for name, one in settings_of(EngineConfig).items() if one.group in (ADAPTERS, TRANSFERS)])
    group_of(serve, TRANSFERS).add_argument(
        "--kv-transfer-secret-file", type=input_file, metavar="FILE", default=None,
        help="holds the secret that all servers and routers between which prompts travel share, and requests with "
        f"kv_transfer_params name (default: that of ${SECRET})")
    add_engine_options(serve)
    add_vllm_flags(serve)
    serve.set_defaults(speculative_config=Speculation(PREDICTION))


def _placement_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cpu-threads", type=Number(whole(1, MOST_PROCESSORS)), metavar="N",
                       help="compute threads of the engine (default: one for each place of --cpu-bind)")
    group.add_argument("--cpu-bind", type=reader(_bind), default=AUTO, metavar="PLACES",
                       help="where compute threads run: auto, each on a processor of its own; cores, each on a "
                       "physical core, node by node; none, anywhere; or a list of processors, as 0-3,8 (default: auto)")


def _bind(text: str) -> str:
    """Reads `--cpu-bind`."""
    try:
        if text not in (AUTO, CORES, NONE):
            numbers(text)
    except ValueError as error:
        raise ValueError(f"{error} (or auto, cores, none)") from None
    return text


def _from_environment(name: str) -> tuple[str, ...]:
    """The keys of a variable; () where it is not set.

    Raises:
        ValueError: it is set and holds no key, so that a server meant to be closed would be open.
    """
    from slotwise.api.limits.api_keys import key_of

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
    from slotwise.api.limits.tiers import load_tiers, objection

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
    _check_adapters(asked)
    model, lines = model_of(asked), notices(asked)
    settings = server_settings(asked, given_settings(asked, ServerSettings))
    transfer = asked.kv_transfer_config
    if asked.kv_transfer_secret_file and transfer is None:
        raise ValueError("--kv-transfer-secret-file has no effect without --kv-transfer-config: leave it out")
    secret = secret_of(asked.kv_transfer_secret_file or "", os.environ) if transfer is not None else ""
    if asked.max_log_len and not asked.enable_log_requests:
        lines.append("--max-log-len has no effect without --enable-log-requests")
    config = EngineConfig.of(**engine_settings(asked) | {
        "model": model, "tiers": tuple([served.tier for served in settings.tiers]),
        "kv_transfer_config": transfer and replace(transfer, secret=secret)})
    tenant_secret = _tenant_secret(config)
    options = make(ModelOptions, given_settings(asked, ModelOptions))
    if asked.event_log:
        check(asked.event_log, overwrite=asked.overwrite_event_log)
    variables = environment(asked.cpu_threads, asked.cpu_bind, read_processors(processors()))
    found = found_for(asked, lines)
    settings = with_names(settings, asked, found)
    config = replace(config, model=str(found.path))
    defaults = read_defaults(config, options.override_generation_config)
    pooling = read_pooling(config.model, options.pooler_config)
    engine = launch_engine(config, asked.log_format, variables)  # it loads while this process imports the rest

    from slotwise.compose.api_server import run_server

    return run_server(config, replace(
        settings, notices=tuple(lines), engine_environment=variables, sampling_defaults=defaults,
        pooling_defaults=pooling, kv_transfer_secret=secret, tenant_secret=tenant_secret), options, engine)


def _tenant_secret(config: EngineConfig) -> bytes:
    """The secret that keeps tenants' names across restarts; empty without blocks on disk.  Raises ValueError."""
    if config.kv_disk is None:
        return b""
    from slotwise.engine.kv_disk import tenant_secret

    try:
        return tenant_secret(Path(config.kv_disk))
    except OSError as error:
        raise ValueError(f"--kv-disk {config.kv_disk}: {described(error)}") from error


def found_for(asked: argparse.Namespace, notices: list[str]) -> FoundModel:
    """Returns the model to serve, and adds to `notices` what to say of it.

    Raises:
        CheckpointError: there is no such model, or it could not be downloaded.
    """
    model = model_of(asked)
    if not model:
        notices.append(f"the built-in model completes Python code; `slotwise serve {next(iter(PUBLISHED))}` serves one "
                       "to chat with")
    try:
        return find_model(model, asked.log_format)
    except DownloadError as error:
        if not asked.or_builtin:
            raise
        notices.append(f"{error}. The built-in model is served in its place: it completes Python code")
        return find_model(BUILTIN)


def with_names(settings: ServerSettings, asked: argparse.Namespace, found: FoundModel) -> ServerSettings:
    """Returns `settings` with the names of the model, its own where none is given.

    Raises:
        ValueError: an adapter has one of them.
    """
    settings = settings.named(asked.served_model_name, found.name, found.aliases)
    for module in settings.lora_modules:
        if module.name in (*settings.model_names, *settings.model_aliases):
            raise ValueError(f"--lora-modules: the name {printable(module.name)} is taken")
    return settings


def server_settings(asked: argparse.Namespace, given: Mapping[str, Any]) -> ServerSettings:
    """Returns the settings of the server, with its keys, tiers and adapters read; its model has no name yet.

    Raises:
        ValueError: settings contradict each other, or TLS cannot be served with these files.
        OSError: a file cannot be read.
    """
    settings = make(ServerSettings, {
        **given, "served_model_name": "", "api_key": api_keys_of(asked.api_key),
        "admin_api_key": admin_key_of(asked.admin_api_key), "tiers": tiers_of(asked), "seed": asked.seed,
        "lora_modules": _modules(given.get("lora_modules", ()))})
    if settings.ssl_certfile:
        from slotwise.api.http.listener import context_of

        context_of(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    return settings


def _modules(given: Sequence[LoraModule]) -> tuple[LoraModule, ...]:
    """Returns the adapters to load at the start, with absolute paths.

    Raises:
        ValueError: a name is there twice, or there is no adapter at a path.
    """
    from slotwise.api.generate.served_adapters import missing

    modules: dict[str, LoraModule] = {}
    for module in given:
        module = module._replace(path=os.path.abspath(module.path))
        if module.name in modules:
            raise ValueError(f"--lora-modules: the name {printable(module.name)} is taken")
        if why := missing(module.path):
            raise ValueError(f"--lora-modules {printable(module.name)}: {why}")
        modules[module.name] = module
    return tuple(modules.values())


def _check_adapters(asked: argparse.Namespace) -> None:
    """Raises ValueError for an option about adapters that says nothing without `--enable-lora`."""
    given = [name for name, one in settings_of(EngineConfig).items()
             if one.group == ADAPTERS and getattr(asked, name) != one.default]
    for name in [*given, *["lora_modules"] * bool(asked.lora_modules)]:
        if not asked.enable_lora:
            raise ValueError(f"{name} is about adapters: add --enable-lora, or leave it out")
