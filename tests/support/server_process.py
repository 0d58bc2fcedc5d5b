"""The whole service in two processes, the engine's without a model.

usage: python server_process.py FOLDER ENGINE_LOG [SETTING=VALUE ...]
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from toy_checkpoint import TEMPLATE  # beside this program

from slotwise.api.app import ROUTES, build_api
from slotwise.api.asgi import App
from slotwise.api.generate.checkpoint_workers import TEMPLATE_LIMITS as RENDERING
from slotwise.api.generate.checkpoint_workers import Template
from slotwise.api.http.api_errors import ApiError
from slotwise.api.http_server import listen, serve
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.limits.tiers import load_tiers
from slotwise.api.parsers.parser_table import output_format
from slotwise.compose.launch import ChildProcess
from slotwise.core.request_defaults import PoolingDefaults, SamplingDefaults
from slotwise.core.setting_fields import settings_of
from slotwise.engine.client import EngineClient
from slotwise.engine.sleep import Sleep
from slotwise.engine.supervisor import Backoff, Supervisor
from slotwise.text.chat_source import ChatTemplateError, find_chat_template
from slotwise.text.tokenizer import Tokenizer

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


async def main(folder: Path, log: Path, *given: str) -> int:
    named = dict(one.split("=") for one in given)
    seconds = named.pop("seconds_per_step", "0.001")
    backoff = Backoff(first=float(named.pop("backoff", "0.1")), max_false_starts=int(named.pop("false_starts", "6")))
    rendering = msgspec.structs.replace(RENDERING, seconds=float(named.pop("template_seconds", RENDERING.seconds)))
    engine_client = EngineClient(max_live=int(named.pop("max_live", "4096")))
    limits: dict[str, Any] = {name: kind(int(named.pop(name))) for name, kind in LIMITS.items() if name in named}
    tiers = load_tiers(path, limits.get("max_num_seqs", 64), {}) if (path := named.pop("tiers", "")) else ()
    limits["tiers"] = [asdict(served.tier) for served in tiers]
    named = {"host": "127.0.0.1"} | named
    settings = ServerSettings("toy", tiers=tiers, **{name: _setting(name, value) for name, value in named.items()})
    engines: list[ChildProcess] = []

    def launch(_: object) -> ChildProcess:
        program, broken = Path(__file__).with_name("engine_process.py"), log.with_name("broken")
        with log.open("a") as output:
            engines.append(ChildProcess(
                [sys.executable, str(program), seconds, str(broken), json.dumps(limits)], stdout=output))
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


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])))
