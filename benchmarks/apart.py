"""Gaps between the commits of a decode engine, quiet and while giant prompts arrive: prefill apart, and one engine.

usage: python -m benchmarks.apart CHECKPOINT [--dtype NAME] [--prompt TOKENS] [--pairs N] [--seconds S] [--json FILE]

Streams decode all the time.  In every second window giant prompts arrive: apart, one engine of one core computes them
and sends their blocks to the other one, which decodes; alone, one engine of both cores does all.  A gap is the time
between the ends of two steps of the decoding engine, from its event log.  The outputs of the giant prompts are compared
with those that the decoding engine gives without a transfer.  Nothing else may run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.reliability.server import Server, serving

from slotwise.bench.results import environment, write_json
from slotwise.observe import event_log
from slotwise.server.prompt_transfer import HEADER

STREAMS = 4
OUTPUT = 8  # tokens of a giant prompt
TARGET = 1.5
PORT = 14579
SHARED: dict[str, Any] = {"kv_connector": "SharedMemoryConnector", "kv_port": PORT}
SECRET = secrets.token_hex(32)
EXTRA = {"kv_connector_extra_config": {"peers": [f"127.0.0.1:{PORT}"]}}


def prompt(number: int, length: int) -> list[int]:
    """Token ids that no other number's begin with."""
    return [(number * 7919 + place * (number + 13)) % 40_000 + 100 for place in range(length)]


async def stream(session: aiohttp.ClientSession, number: int) -> None:
    body = {"prompt": prompt(10_000 + number, 32), "max_tokens": 12_000, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_interval": 16}
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            pass


async def asked(session: aiohttp.ClientSession, tokens: list[int], most: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": tokens, "max_tokens": most, "ignore_eos": True, "temperature": 0, "return_token_ids": True} | more
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        found: dict[str, Any] = await response.json()
        return found


async def giant(decode: aiohttp.ClientSession, prefill: aiohttp.ClientSession | None, tokens: list[int]) -> list[int]:
    """The output of one giant prompt, sent as the front door sends it."""
    if prefill is None:
        return list((await asked(decode, tokens, OUTPUT))["choices"][0]["token_ids"])
    name = secrets.token_hex(16)
    source = {"do_remote_prefill": True, "transfer_id": name, "remote_host": "127.0.0.1", "remote_port": PORT}
    _, answer = await asyncio.gather(
        asked(prefill, tokens, 1, kv_transfer_params={"do_remote_decode": True, "transfer_id": name}),
        asked(decode, tokens, OUTPUT, kv_transfer_params=source))
    return list(answer["choices"][0]["token_ids"])


async def windows(decode: Server, prefill: Server | None, given: argparse.Namespace) -> dict[str, Any]:
    """Quiet and busy windows in turn: their bounds in nanoseconds, and the outputs of the giant prompts."""
    found: dict[str, Any] = {"quiet": [], "giant": [], "outputs": {}}
    common: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(600), "headers": {HEADER: SECRET}}
    async with aiohttp.ClientSession(decode.url, **common) as one, contextlib.AsyncExitStack() as stack:
        other = None if prefill is None else await stack.enter_async_context(
            aiohttp.ClientSession(prefill.url, **common))
        streams = [asyncio.create_task(stream(one, number)) for number in range(STREAMS)]
        found["outputs"][0] = await giant(one, other, prompt(0, given.prompt))
        for _ in range(given.pairs):
            began = time.monotonic_ns()
            await asyncio.sleep(given.seconds)
            found["quiet"].append((began, time.monotonic_ns()))
            began = time.monotonic_ns()
            while time.monotonic_ns() < began + given.seconds * 1e9:
                number = len(found["outputs"])
                found["outputs"][number] = await giant(one, other, prompt(number, given.prompt))
            found["giant"].append((began, time.monotonic_ns()))
        for task in streams:
            task.cancel()
        await asyncio.wait(streams)
        if other is not None:  # a salt of its own: nothing that was received is found
            found["same"] = [output == list((await asked(
                one, prompt(number, given.prompt), OUTPUT, cache_salt=str(number)))["choices"][0]["token_ids"])
                for number, output in list(found["outputs"].items())[:3]]
    return found


def gaps(log: Path, bounds: list[tuple[int, int]]) -> list[tuple[float, int, int]]:
    """The gaps within the windows, in order of size: milliseconds, and rows and tokens of the step that ends them."""
    steps = [entry for entry in event_log.read_file(log) if isinstance(entry, event_log.Step) and entry.counts]
    return sorted(((later.ended_ns - sooner.ended_ns) / 1e6, len(later.counts), sum(later.counts))
                  for sooner, later in pairwise(steps)
                  if any(begin <= sooner.ended_ns and later.ended_ns <= end for begin, end in bounds))


@contextlib.contextmanager
def servers(given: argparse.Namespace, log: Path, *, apart: bool) -> Iterator[tuple[Server, Server | None]]:
    secret = log.with_suffix(".secret")
    secret.write_text(SECRET)
    roles = ("--kv-transfer-secret-file", str(secret), "--kv-transfer-config")
    common = (str(given.checkpoint), "--dtype", given.dtype, "--max-num-seqs", "16", "--max-model-len", "16384",
              "--kv-cache-memory", "1GiB")
    with contextlib.ExitStack() as stack:
        prefill = None if not apart else stack.enter_context(serving(
            *common, "--cpu-bind", "0", *roles, json.dumps(SHARED | {"kv_role": "kv_producer"})))
        consumer = () if not apart else (
            "--cpu-bind", "1", *roles, json.dumps(SHARED | EXTRA | {"kv_role": "kv_consumer"}))
        yield stack.enter_context(serving(*common, "--event-log", str(log), *consumer)), prefill


def measured(given: argparse.Namespace, folder: Path, *, apart: bool) -> dict[str, Any]:
    log = folder / f"{apart}.jsonl"
    with servers(given, log, apart=apart) as (decode, prefill):
        found = asyncio.run(windows(decode, prefill, given))
    result: dict[str, Any] = {"giant_prompts": len(found["outputs"]), "same_tokens": found.get("same")}
    for name in ("quiet", "giant"):
        found_gaps = gaps(log, found[name])
        sizes = [milliseconds for milliseconds, _, _ in found_gaps]
        result[name] = {"gaps": len(sizes), "p50_ms": sizes[len(sizes) // 2], "p99_ms": sizes[len(sizes) * 99 // 100],
                        "worst_ms": sizes[-1], "longest": found_gaps[-20:]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", type=int, default=4000, metavar="TOKENS")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of a window")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, apart in (("apart", True), ("one engine", False)):
            result = results[name] = measured(given, Path(folder), apart=apart)
            ratio = result["giant"]["p99_ms"] / result["quiet"]["p99_ms"]
            print(f"{name}: p50 {result['quiet']['p50_ms']:.1f} -> {result['giant']['p50_ms']:.1f} ms, p99 "
                  f"{result['quiet']['p99_ms']:.1f} -> {result['giant']['p99_ms']:.1f} ms ({ratio:.2f}; {TARGET} "
                  f"wanted), worst {result['quiet']['worst_ms']:.1f} -> {result['giant']['worst_ms']:.1f} ms; "
                  f"{result['giant_prompts']} giant prompts, same tokens {result['same_tokens']}", flush=True)
    if given.json:
        write_json(given.json, environment() | {"checkpoint": given.checkpoint.name, "dtype": given.dtype,
                                                "prompt": given.prompt, "streams": STREAMS, **results})


if __name__ == "__main__":
    main()
