"""Stalls of streams while adapters are loaded: a real server over HTTP, windows with loads and without in turn.

usage: python -m benchmarks.lora_loading CHECKPOINT [--streams N] [--pairs N] [--json FILE]

Streams of the base model and of adapters run for a window.  In every second window an adapter of rank 16 on every
product is loaded and unloaded again and again.  A gap is the time between two events of a stream; prompts run before
the window begins, so that only decode steps and loads are in it.  Nothing else may run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.lora import ADAPTERS, RANK, write_adapter
from benchmarks.reliability.server import serving

from slotwise.bench.results import environment, write_json

SECONDS = 5.0  # of a window
BEGIN = 0.5  # seconds of a window that are not counted: prompts run
TARGET = 0.1  # seconds that no stream may stall


async def stream(session: aiohttp.ClientSession, model: str, number: int, until: float) -> list[float]:
    """Returns the times of a stream's events."""
    body = {"model": model, "prompt": [number * 37 % 1000 + place for place in range(16)], "stream": True,
            "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    times = []
    async with session.post("/v1/completions", json=body | {"max_tokens": 1800}) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
            if time.monotonic() > until:
                break
    return times


async def loads(session: aiohttp.ClientSession, path: str, begin: float, until: float) -> list[float]:
    """Loads and unloads an adapter until the window ends.  Returns the seconds of each load."""
    await asyncio.sleep(begin - time.monotonic())
    taken = []
    while time.monotonic() < until - 0.2:
        started = time.monotonic()
        async with session.post("/v1/load_lora_adapter", json={"lora_name": "more", "lora_path": path}) as response:
            response.raise_for_status()
        taken.append(time.monotonic() - started)
        async with session.post("/v1/unload_lora_adapter", json={"lora_name": "more"}) as response:
            response.raise_for_status()
        await asyncio.sleep(0.05)
    return taken


async def window(url: str, models: list[str], loaded: str) -> dict[str, Any]:
    """One window. Args: loaded: the folder of the adapter that is loaded again and again; empty: none is."""
    begin = time.monotonic() + BEGIN
    until = begin + SECONDS
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(120)) as session:
        loading = asyncio.create_task(loads(session, loaded, begin, until)) if loaded else None
        streams = await asyncio.gather(*(stream(session, model, i, until) for i, model in enumerate(models)))
        taken = await loading if loading is not None else []
    gaps = [later - sooner for times in streams for sooner, later in pairwise(times)
            if sooner > begin]
    return {"worst_gap_ms": 1e3 * max(gaps), "median_gap_ms": 1e3 * statistics.median(gaps), "events": len(gaps),
            "loads": len(taken), "median_load_ms": 1e3 * statistics.median(taken) if taken else None}


def measured(base: Path, folder: Path, streams: int, pairs: int) -> list[dict[str, Any]]:
    requests = [write_adapter(folder / f"a{number}", base, number) for number in range(ADAPTERS + 1)]
    modules = [f"{request.lora_name}={request.lora_path}" for request in requests[:-1]]
    names = [request.lora_name for request in requests[:-1]]
    with serving(str(base), "--served-model-name", "base", "--enable-lora", "--max-loras", str(ADAPTERS),
                 "--max-model-len", "2048", "--max-num-seqs", str(streams), "--lora-modules", *modules) as server:
        models = [("base", *names)[number % (len(names) + 1)] for number in range(streams)]
        asyncio.run(window(server.url, models, requests[-1].lora_path))  # sizes of steps that were not met
        return [{"with loads" if loaded else "without": asyncio.run(window(server.url, models, loaded))
                 for loaded in ("", requests[-1].lora_path)} for _ in range(pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(given.checkpoint, Path(folder), given.streams, given.pairs)
    for pair in found:
        for name, one in pair.items():
            print(f"{name}: worst gap {one['worst_gap_ms']:.1f} ms, median {one['median_gap_ms']:.2f} ms of "
                  f"{one['events']}; {one['loads']} loads")
    worst = max(pair["with loads"]["worst_gap_ms"] for pair in found)
    print(f"worst gap with loads {worst:.1f} ms; at most {1e3 * TARGET:.0f} wanted")
    if given.json:
        write_json(given.json, environment() | {
            "checkpoint": given.checkpoint.name, "streams": given.streams, "rank": RANK, "pairs": found})


if __name__ == "__main__":
    main()
