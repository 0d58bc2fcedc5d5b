"""The whole service in two processes, the engine's without a model; started by `fork_server`.

arguments: FOLDER ENGINE_LOG [SETTING=VALUE ...]
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import uvloop

from slotwise.api.app import ROUTES, build_api
from slotwise.api.asgi import App
from slotwise.api.generate.checkpoint_workers import TEMPLATE_LIMITS as RENDERING
from slotwise.api.generate.checkpoint_workers import Template
from slotwise.api.http.api_errors import ApiError
from slotwise.api.http_server import listen, serve
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.limits.tiers import load_tiers
from slotwise.api.parsers.parser_table import output_format
from slotwise.core.request_defaults import PoolingDefaults, SamplingDefaults
from slotwise.core.setting_fields import settings_of
from slotwise.engine.client import EngineClient
from slotwise.engine.ipc import pair
from slotwise.engine.sleep import Sleep
from slotwise.engine.supervisor import Backoff, Supervisor
from slotwise.text.chat_source import ChatTemplateError, find_chat_template
from slotwise.text.tokenizer import Tokenizer
from support import engine_process
from support.toy_checkpoint import TEMPLATE

LIMITS = {  # the engine's
    "num_labels": int, "num_blocks": int, "max_model_len": int, "max_num_seqs": int, "enable_prefix_caching": bool}
LISTS = ("api_keys", "allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers", "more_model_names")
TEXTS = ("admin_api_key", "host", "root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs",
         "tool_call_parser", "reasoning_parser")


def _setting(name: str, value: str) -> Any:
    if name in LISTS:
        return tuple(value.split(","))
    if (declared := settings_of(ServerSettings).get(name)) is not None and declared.type.startswith("bool"):
        return value == "1"
    if name == "pooling_defaults":
        return PoolingDefaults(**json.loads(value))
    if name == "sampling_defaults":
        return SamplingDefaults(**json.loads(value))
    if name in TEXTS:
        return value
    return float(value) if "timeout" in name else int(value)


class ForkedEngine:
    """A toy engine in a process of its own: what the server uses of `ChildProcess` and its `process`."""

    held_bytes = 0

    def __init__(self, seconds: float, log: Path, limits: dict[str, Any]) -> None:
        self.started, self.returncode = time.monotonic(), None
        self.channel, theirs = pair()
        self.process = self
        self.pid = os.fork()
        if self.pid == 0:
            _become_engine(theirs.detach(), seconds, log, limits)
        theirs.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    @property
    def ended(self) -> bool:
        return self.poll() is not None

    def kill(self) -> None:
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)


def _become_engine(descriptor: int, seconds: float, log: Path, limits: dict[str, Any]) -> NoReturn:
    """Runs the engine in a process that was just forked, after closing what else it inherited."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)  # the parent's event loop
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP])  # as `spawn.start` does
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        logging.getLogger().handlers.clear()
        engine_process.run(seconds, log.with_name("broken"), limits, descriptor)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def _serve(folder: Path, log: Path, *given: str) -> int:
    named = dict(one.split("=") for one in given)
    seconds = float(named.pop("seconds_per_step", "0.001"))
    backoff = Backoff(first=float(named.pop("backoff", "0.1")), max_false_starts=int(named.pop("false_starts", "6")))
    rendering = msgspec.structs.replace(RENDERING, seconds=float(named.pop("template_seconds", RENDERING.seconds)))
    engine_client = EngineClient(max_live=int(named.pop("max_live", "4096")))
    limits: dict[str, Any] = {name: kind(int(named.pop(name))) for name, kind in LIMITS.items() if name in named}
    tiers = load_tiers(path, limits.get("max_num_seqs", 64), {}) if (path := named.pop("tiers", "")) else ()
    limits["tiers"] = [asdict(served.tier) for served in tiers]
    named = {"host": "127.0.0.1"} | named
    settings = ServerSettings("toy", tiers=tiers, **{name: _setting(name, value) for name, value in named.items()})
    engines: list[ForkedEngine] = []

    def launch(_: object) -> ForkedEngine:
        engines.append(ForkedEngine(seconds, log, limits))
        return engines[-1]

    supervisor = Supervisor(engine_client, launch, settings.engine_timeout, backoff)
    supervisor.launch()
    await supervisor.ready()
    tokenizer = Tokenizer.load(folder)
    source = find_chat_template(folder) or ""
    Template.__init__.__defaults__ = (rendering,)  # also of templates that requests bring
    template = Template(source, tokenizer.special_tokens)
    if source != TEMPLATE:  # that one reads no variables: its worker need not start before the first chat
        with contextlib.suppress(ApiError, ChatTemplateError):
            await template.variables("")
    form = output_format(settings.tool_call_parser, settings.reasoning_parser, settings.enable_auto_tool_choice, source,
                         tokenizer.special_by_text)
    app = App(build_api(engine_client, tokenizer, template, settings, output_format=form,
                        sleep=Sleep(engine_client, supervisor)), ROUTES)
    for heavy in ("torch", "numpy", "numba", "jinja2"):
        assert heavy not in sys.modules, f"the API process has imported {heavy}"
    await serve(app, listen(settings.host, 0), lambda url: print(url, engines[-1].process.pid, flush=True))
    app.api.close()
    await supervisor.end()
    print("engine", engines[-1].process.returncode, flush=True)
    return 1 if engine_client.hopeless.is_set() else 0


def main(folder: str, log: str, *given: str) -> int:
    logging.basicConfig(level=logging.INFO)
    return uvloop.run(_serve(Path(folder), Path(log), *given))
