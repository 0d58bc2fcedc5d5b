"""slotwise serve: the HTTP service."""

from __future__ import annotations

import argparse
import os
from typing import Any

from slotwise import builtin
from slotwise.cli.options import BUILTIN_NAME, add_command, add_engine_options, engine_settings
from slotwise.engine.config import EngineConfig


def add(commands: Any) -> None:
    serve = add_command(commands, "serve", "answer OpenAI-compatible requests over HTTP", run)
    serve.add_argument("model", nargs="?", help="a checkpoint's folder or a hub id (default: the built-in model)")
    _server_options(serve)
    add_engine_options(serve)


def _server_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    group.add_argument("--port", type=int, default=8000, help="0 takes any free port (default: 8000)")
    group.add_argument("--api-key", default=os.environ.get("SLOTWISE_API_KEY", ""), metavar="KEY",
                       help="clients must send it as a bearer token (default: $SLOTWISE_API_KEY)")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file instead of the model's own template")
    group.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
                       help="how long running requests may take to end after SIGTERM (default: 30)")
    group.add_argument("--stream-interval", type=int, default=1, metavar="TOKENS",
                       help="tokens gathered before a stream sends them (default: 1)")


def run(asked: argparse.Namespace) -> int:
    from slotwise.compose.server import run_server
    from slotwise.server.settings import ServerSettings

    config = EngineConfig.of(model=asked.model or str(builtin.path()), **engine_settings(asked))
    settings = ServerSettings(
        served_model_name=asked.served_model_name or asked.model or BUILTIN_NAME, api_key=asked.api_key,
        shutdown_timeout=asked.shutdown_timeout, stream_interval=asked.stream_interval, seed=asked.seed)
    return run_server(config, settings, (asked.host, asked.port), asked.chat_template)
