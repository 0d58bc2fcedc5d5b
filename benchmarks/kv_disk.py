"""First tokens after a restart, without and with blocks on disk, and gaps of streams while a prompt is read.

    python -m benchmarks.kv_disk MODEL restarts
    python -m benchmarks.kv_disk MODEL streams

A server is started, answers prompts, and is started again.  `warm` is the time to the first token of a prompt whose
blocks are on disk, `cold` that of another prompt of the same length.  With `streams`, four streams decode meanwhile.
Their gaps are measured in turns: without prompts, from the arrival of a `warm` prompt on, and from that of the same one
on, now in `memory`, for as long each; at last until the first token of a `cold` one.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

NUM_TOKENS = 4000
OUTPUT = 4000  # tokens of a stream
NUM_WARM = 5  # prompts that are read beside the streams
PERIOD = 0.9  # seconds of each measurement, in which a prompt is read
RESULT = Path(__file__).parent / "results" / "kv-disk-cpu.json"
READY = re.compile(r"Ready after .* on (https?://\S+)")


@contextmanager
def serving(model: str, folder: Path) -> Iterator[httpx.Client]:
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "slotwise.cli", "serve", model, "--port", "0", "--max-num-seqs", "8",
             "--max-model-len", "8192", "--kv-disk", str(folder / "blocks"), "--kv-disk-size", "4"],
            stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            found = next(filter(None, map(READY.search, process.stdout)))
            with httpx.Client(base_url=found[1], timeout=600) as client:
                yield client
        finally:
            process.terminate()
            process.wait(120)


def prompt(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(1000, 40000) for _ in range(NUM_TOKENS)]


def times(client: httpx.Client, tokens: list[int], max_tokens: int) -> list[float]:
    """Returns when the request was sent and when each of its tokens arrived, in seconds."""
    body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    found = [time.monotonic()]
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append(time.monotonic())
    return found


def first(client: httpx.Client, tokens: list[int]) -> float:
    sent, came, *_ = times(client, tokens, 1)
    return came - sent


def metrics(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    return {found[1]: float(found[2]) for found in re.finditer(
        r'slotwise:kv_disk_blocks_total\{event="(\w+)".*?\} (\S+)', text)} | {
        found[1]: float(found[2]) for found in re.finditer(
            r'slotwise:prompt_tokens_by_cause_total\{cause="(found\w*)".*?\} (\S+)', text)}


def wait_written(folder: Path) -> None:
    number = -1
    while number != (number := len(list((folder / "blocks").glob("*.kv")))) or number == 0:
        time.sleep(1)


def gaps(found: list[float], begin: float, end: float) -> list[float]:
    return [1e3 * (later - sooner) for sooner, later in pairwise(found[1:])
            if begin <= later <= end]


def beside_streams(client: httpx.Client) -> dict[str, dict[str, float]]:
    """The gaps of four streams in milliseconds while prompts are read, while one is computed, and in between."""
    found: list[list[float]] = []
    threads = [threading.Thread(target=lambda number=number: found.append(  # type: ignore[misc]
        times(client, prompt(1000 + number)[:32], OUTPUT))) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    spans: dict[str, list[tuple[float, float]]] = {"quiet": [], "warm": [], "memory": [], "cold": []}
    waits: dict[str, list[float]] = {what: [] for what in spans}

    def measure(what: str, number: int | None) -> None:
        began = time.monotonic()
        if number is not None:
            waits[what].append(first(client, prompt(number)))
        if what != "cold":
            time.sleep(max(0.0, began + PERIOD - time.monotonic()))
        spans[what].append((began, time.monotonic()))

    for number in range(NUM_WARM):
        measure("quiet", None)
        measure("warm", number)
        measure("memory", number)
        measure("quiet", None)  # steps take longer with every token of the streams
    measure("cold", 80)
    for thread in threads:
        thread.join()
    return {what: described([gap for one in found for span in parts for gap in gaps(one, *span)]) | {
        "first_s": round(statistics.median(waits[what] or [0.0]), 3)} for what, parts in spans.items()}


def described(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {"p50": round(statistics.median(values), 2), "p99": round(values[int(0.99 * (len(values) - 1))], 2),
            "longest": round(values[-1], 2), "number": len(values)}


def restarts(model: str, folder: Path, repeats: int) -> list[dict[str, float]]:
    found = []
    for number in range(repeats):
        with serving(model, folder) as client:
            first(client, prompt(99)[:64])
            cold, warm = first(client, prompt(50 + number)), first(client, prompt(number))
            found.append({"cold_s": round(cold, 3), "warm_s": round(warm, 3), **metrics(client)})
    return found


def streams(model: str, folder: Path) -> dict[str, dict[str, float]]:
    with serving(model, folder) as client:
        first(client, prompt(99)[:600])
        return beside_streams(client) | {"metrics": metrics(client)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("what", choices=("restarts", "streams"))
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(asked.model, folder) as client:
            for number in range(asked.repeats if asked.what == "restarts" else NUM_WARM):
                first(client, prompt(number))
                wait_written(folder)
        known |= {"model": asked.model, "tokens": NUM_TOKENS, "date": time.strftime("%-d %B %Y")}
        known[asked.what] = (restarts(asked.model, folder, asked.repeats) if asked.what == "restarts"
                             else streams(asked.model, folder))
    RESULT.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(known[asked.what], indent=1))


if __name__ == "__main__":
    main()
