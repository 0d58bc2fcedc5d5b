"""Builds and runs the server: an engine process, and in this process its HTTP service.  No torch here."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import uvloop

from slotwise.compose.cores import Cores
from slotwise.compose.exchange import Exchange
from slotwise.compose.launch import ChildProcess
from slotwise.compose.served_model import ModelOptions, read_model
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo
from slotwise.observe import lines
from slotwise.server.serve import listen, serve
from slotwise.server.settings import ServerSettings

MB = 1e6  # bytes

logger = logging.getLogger(__name__)


def run_server(
    config: EngineConfig, settings: ServerSettings, address: tuple[str, int], options: ModelOptions,
    first: ChildProcess,
) -> int:
    """Serves until a signal arrives; returns the exit status.

    Args:
        address: host and port; port 0: any free port.
        options: for each model that is served.
        first: an engine process started with `config`; it ends with the server.

    Raises:
        OSError, TokenizerError, ChatTemplateError, EngineError, TracesError: one line that says what is wrong, before
            anything is served.
    """
    lines.set_up(settings.log_format)
    try:
        with listen(*address) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, settings, listener, options, first))
    finally:
        first.kill()


async def _serve(
    config: EngineConfig, settings: ServerSettings, listener: socket.socket, options: ModelOptions,
    first: ChildProcess,
) -> int:
    model = read_model(config, settings, options)  # the engine is loading meanwhile
    async with Exchange(model, options, Cores(), first) as app:
        engine_client = app.api.engine.client
        await serve(app, listener, lambda url: _greet(
            url, engine_client.info, settings, time.monotonic() - first.started))
    return 1 if engine_client.hopeless.is_set() else 0


def _places(info: EngineInfo) -> str:
    """What computes, as text."""
    ranks, stages = info.tensor_parallel_size * info.pipeline_parallel_size, info.pipeline_parallel_size
    if ranks == 1:
        return info.device
    return f"{info.device}, {ranks} ranks" + (f" in {stages} stages" if stages > 1 else "")


def _greet(url: str, info: EngineInfo, settings: ServerSettings, seconds: float) -> None:
    """Reports the budget: three lines of text on stdout, or one JSON line on stderr with all the numbers."""
    limits, used, name = info.limits, info.memory, settings.served_model_name
    if settings.log_format == lines.JSON:
        lines.tell(logger, f"ready on {url}", {
            "url": url, "model": name, "device": info.device,
            "tensor_parallel_size": info.tensor_parallel_size,
            "pipeline_parallel_size": info.pipeline_parallel_size, "dtype": info.dtype,
            "quantization": info.quantization, "product_path": info.product_path, "cache_dtype": info.cache_dtype,
            "batch_invariant": info.batch_invariant,
            "seconds": round(seconds, 1), "slots": limits.max_num_seqs, "blocks": limits.num_blocks,
            "block_size": limits.block_size, "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len, "weights_bytes": used.weights, "cache_bytes": used.cache,
            "workspace_bytes": used.workspace, "graph_bytes": used.graphs, "host_bytes": used.host,
            "runtime_bytes": used.runtime, "memory_bytes": used.total})
        return
    captured = f", {used.graphs / MB:,.0f} MB for captured steps" if used.graphs else ""
    evicted = f", {used.host / MB:,.0f} MB of host memory for evicted blocks" if used.host else ""
    print(
        f"{name} on {_places(info)} ({info.weights}, {info.product_path} products): {limits.max_num_seqs} slots, "
        f"{limits.num_blocks} blocks of {limits.block_size} tokens, steps of up to {limits.max_num_batched_tokens} "
        f"tokens, sequences of up to {limits.max_model_len}\n"
        f"Memory at most: {used.weights / MB:,.0f} MB of weights, {used.cache / MB:,.0f} MB of cache "
        f"({info.cache_dtype}), {used.workspace / MB:,.0f} MB for a step, {used.runtime / MB:,.0f} MB for the runtime"
        f"{captured}{evicted}\n"
        f"Ready after {seconds:.1f} s on {url}  (try {url}/v1/models)", flush=True)
