"""Kills replicas and their engines at random moments under load, and watches every stream.

    clients ─► slotwise scale --replicas 2 ─► replica 0, replica 1     SIGKILL to one of: a replica's server, its engine

Each client streams one prompt after the other, greedily; the tokens of a stream have to begin the text that an
undisturbed one had, so a token that came twice, or of another request, is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

READY = re.compile(r"Ready after .* on (http://\S+)")
PROMPTS = [f"def function_{number}(first, second):" for number in range(8)]
TOKENS = 96
CLIENTS = 6
PAUSE = (0.2, 3.0)  # seconds between full service and the next kill


@dataclass
class StreamTally:
    """What clients saw."""

    ends: Counter[str] = field(default_factory=Counter)
    longest_silence: float = 0.0  # seconds between two events of a stream, or before its first or its end
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, end: str, silence: float) -> None:
        with self.lock:
            self.ends[end] += 1
            self.longest_silence = max(self.longest_silence, silence)


def body(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}


def stream(client: httpx.Client, prompt: str) -> tuple[str, str, float]:
    """Returns the text of a stream, how it ended, and its longest silence in seconds."""
    text, last, silence = "", time.monotonic(), 0.0
    with client.stream("POST", "/v1/completions", json=body(prompt)) as response:
        if response.status_code != 200:
            response.read()
            return "", f"{response.status_code} {response.json()['error']['code']}", time.monotonic() - last
        for line in response.iter_lines():
            silence, last = max(silence, time.monotonic() - last), time.monotonic()
            if line == "data: [DONE]":
                return text, "done", silence
            if line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return text, event["error"]["code"] or "error", silence
                text += event["choices"][0]["text"]
    return text, "cut short", silence


def keep_asking(url: str, seen: StreamTally, expected: dict[str, str], stopping: threading.Event, seed: int) -> None:
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stopping.is_set():
            prompt = rng.choice(PROMPTS)
            try:
                text, end, silence = stream(client, prompt)
            except httpx.HTTPError as error:
                text, end, silence = "", type(error).__name__, 0.0
            seen.ended(end, silence)
            if not expected[prompt].startswith(text) or (end == "done" and text != expected[prompt]):
                seen.wrong.append(f"{prompt}: {text!r}")
            if not text:
                time.sleep(0.1)


def children(parent: int, module: str) -> list[int]:
    """Child processes of `parent` that run `module`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            is_child = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            if is_child and module.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def num_up(client: httpx.Client) -> int:
    return sum(one["is_up"] for one in client.get("/replicas").json()["replicas"])


@contextlib.contextmanager
def scaled() -> Iterator[tuple[int, str]]:
    """Two replicas of the built-in model behind a door; its process and URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slotwise", "scale", "--port", "0", "--replicas", "2", "--max-num-seqs", "8",
         "--max-model-len", "512"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, next(found[1] for line in process.stdout if (found := READY.search(line)))
    finally:
        process.terminate()
        process.wait(60)


def kill_one(door: int, rng: random.Random) -> str:
    """Kills a replica's server or its engine.  Returns which."""
    server = rng.choice(children(door, "replica_main"))
    engines = children(server, "slotwise.compose.engine_process")
    if engines and rng.random() < 0.5:
        os.kill(engines[0], signal.SIGKILL)
        return "engine"
    os.kill(server, signal.SIGKILL)
    return "server"


def run(kills: int, seed: int, seconds: float) -> dict[str, Any]:
    rng, seen, stopping, victims = random.Random(seed), StreamTally(), threading.Event(), Counter[str]()
    recoveries, unhealthy = [], 0
    with scaled() as (door, url), httpx.Client(base_url=url, timeout=60) as client:
        while num_up(client) < 2:
            time.sleep(0.1)
        expected = {prompt: stream(client, prompt)[0] for prompt in PROMPTS}
        threads = [threading.Thread(target=keep_asking, args=(url, seen, expected, stopping, number))
                   for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + seconds
        while len(recoveries) < kills and time.monotonic() < ends:
            time.sleep(rng.uniform(*PAUSE))
            victims[kill_one(door, rng)] += 1
            killed = time.monotonic()
            time.sleep(1.0)
            while num_up(client) < 2:
                unhealthy += client.get("/health").status_code != 200
                time.sleep(0.1)
            recoveries.append(time.monotonic() - killed)
        stopping.set()
        for thread in threads:
            thread.join()
    return {"kills": len(recoveries), "seed": seed, "victims": victims, "ends": seen.ends, "wrong": seen.wrong[:5],
            "num_wrong": len(seen.wrong), "longest_silence_s": round(seen.longest_silence, 2),
            "longest_recovery_s": round(max(recoveries), 2), "health_not_200": unhealthy}
