"""Measures one GGUF file on Slotwise's server or on llama.cpp's, with the same client and the same requests.

    cmake -B build -DGGML_NATIVE=ON LLAMA_CPP && cmake --build build --target llama-server llama-quantize
    python -m benchmarks.beside_llamacpp speed slotwise FILE
    python -m benchmarks.beside_llamacpp speed build/bin/llama-server FILE --threads 2

One engine after the other, never side by side; quote ratios of one sitting.  Prompts are random token ids, end tokens
are ignored, nothing is cached between requests.

    one, eight, thirty_two   streams of 64 tokens after prompts of 128: tokens per second between the first and the last
    prompt                   tokens of one prompt of 1,024 per second until its first token
    mixed                    the mixed trace, 64 requests at once (peers/same_requests.py): output tokens per second
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
from benchmarks.commands import parser_of
from benchmarks.peers.same_requests import VOCABULARY, workload

from slotwise.measure.bench.results import environment, write_json

SLOTS, CONTEXT = 64, 1600
STREAM_PROMPT, STREAM_TOKENS, LONG_PROMPT = 128, 64, 1024
READY_SECONDS = 170
ROUNDS = 3
STREAMS = {"one": 1, "eight": 8, "thirty_two": 32}
MEASURES = (*STREAMS, "prompt", "mixed")


class Answer(NamedTuple):
    first: float  # seconds, by the clock
    last: float
    tokens: int


def command(asked: argparse.Namespace, port: int) -> list[str]:
    if asked.engine == "slotwise":
        return [sys.executable, "-m", "slotwise.cli", "serve", asked.file, "--port", str(port),
                "--max-num-seqs", str(SLOTS), "--max-model-len", str(CONTEXT), "--no-enable-prefix-caching",
                "--served-model-name", "model", "--quantization", asked.quantization]
    threads = str(asked.threads)
    return [asked.engine, "-m", asked.file, "--port", str(port), "-t", threads, "-tb", threads, "-np", str(SLOTS),
            "-c", str(SLOTS * CONTEXT), "-a", "model", "--no-webui", "--cache-ram", "0"]


@contextlib.contextmanager
def server(asked: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """The address of a server, and the seconds until it was ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(asked.log, "w") as output:
        process = subprocess.Popen(command(asked, port), stdout=output, stderr=output, env=os.environ)
        base, began = f"http://127.0.0.1:{port}", time.perf_counter()
        try:
            await_ready(process, base)
            yield base, time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(20)


def await_ready(process: subprocess.Popen[bytes], base: str) -> None:
    until = time.perf_counter() + READY_SECONDS
    while time.perf_counter() < until:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}; --log FILE keeps what it said")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/health", timeout=5):
            return
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


async def stream(session: aiohttp.ClientSession, base: str, prompt: list[int], tokens: int) -> Answer:
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "cache_prompt": False, "stream_options": {"include_usage": True}}
    first = last = 0.0
    produced = 0
    async with session.post(f"{base}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise SystemExit(f"{reply.status}: {await reply.text()}")
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                last = time.perf_counter()
                first = first or last
            produced = (event.get("usage") or {}).get("completion_tokens", produced)
    if produced != tokens:
        raise SystemExit(f"{produced} tokens came, and {tokens} were asked for")
    if last == first and tokens > 1:
        raise SystemExit("all tokens came at once: llama.cpp sends no token that has no text")
    return Answer(first, last, produced)


async def streams(session: aiohttp.ClientSession, base: str, count: int, draw: random.Random) -> float:
    """Tokens per second of all streams, from when all have their first until the first ends."""
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(STREAM_PROMPT)] for _ in range(count)]
    answers = await asyncio.gather(*(stream(session, base, prompt, STREAM_TOKENS) for prompt in prompts))
    return sum((answer.tokens - 1) / (answer.last - answer.first) for answer in answers)


async def prompt_rate(session: aiohttp.ClientSession, base: str, draw: random.Random) -> float:
    began = time.perf_counter()
    answer = await stream(session, base, [draw.randrange(10, VOCABULARY) for _ in range(LONG_PROMPT)], 2)
    return LONG_PROMPT / (answer.first - began)


async def mixed(session: aiohttp.ClientSession, base: str, seed: int) -> float:
    work = workload(f"mixed:{seed}", SLOTS)
    began = time.perf_counter()
    answers = await asyncio.gather(*(
        stream(session, base, work.prompt_ids(request, VOCABULARY), request.num_output) for request in work.requests))
    return sum(answer.tokens for answer in answers) / (time.perf_counter() - began)


async def median(measure: Callable[[], Awaitable[float]]) -> float:
    return statistics.median([await measure() for _ in range(ROUNDS)])


async def measured(base: str, seed: int, only: list[str]) -> dict[str, float]:
    draw = random.Random(seed)
    limits = aiohttp.ClientTimeout(600)
    connections = aiohttp.TCPConnector(limit=0, force_close=True)  # llama.cpp closes those that it has answered on
    async with aiohttp.ClientSession(timeout=limits, connector=connections) as session:
        figures: dict[str, float] = {}
        await streams(session, base, 2, draw)  # not counted
        measures: dict[str, Callable[[], Awaitable[float]]] = {
            **{name: lambda count=count: median(lambda: streams(session, base, count, draw))  # type: ignore[misc]
               for name, count in STREAMS.items()},
            "prompt": lambda: median(lambda: prompt_rate(session, base, draw)),
            "mixed": lambda: mixed(session, base, seed)}
        for name in only:
            figures[name] = await measures[name]()
        return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("engine", help="slotwise, or the path of llama-server")
    parser.add_argument("file", help="a model in GGUF, or for Slotwise a checkpoint's folder")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp")
    parser.add_argument("--quantization", default="none", help="of Slotwise, of a checkpoint that is not quantized")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="what is measured")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--json", type=Path, help="the file to which the figures are added")
    parser.add_argument("--log", default=os.devnull, help="of the server")
    asked = parser.parse_args()
    with server(asked) as (base, seconds):
        figures = {"ready": seconds} | asyncio.run(measured(base, asked.seed, asked.only))
    run = {"engine": "slotwise" if asked.engine == "slotwise" else "llama.cpp", "file": os.path.basename(asked.file),
           "quantization": asked.quantization} | {key: round(value, 2) for key, value in figures.items()}
    print(json.dumps(run), flush=True)
    if asked.json:
        runs = json.loads(asked.json.read_text())["runs"] if asked.json.exists() else []
        write_json(asked.json, {"runs": [*runs, run | {"seed": asked.seed, "environment": environment()}]})
