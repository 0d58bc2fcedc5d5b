"""Measures `/v1/systemone` on Slotwise and on vLLM: the same model, states and questions, one engine after the other.

    python -m benchmarks.checkpoint FOLDER --shape qwen3-0.6b      # or any checkpoint of Qwen3, which vLLM decides with
    python -m benchmarks.decisions FOLDER --vllm ENVIRONMENT/bin/vllm --output decisions-cpu.json

Each call asks 16 questions about a state of 1,200 words.  *First* is a state that the server has not seen, *again* the
same one, *one question* a new state with a single question; seconds, medians of eight.  Then eight clients ask about 16
new states: decisions per second, and how many of these states have the same answers, bit for bit, when they are asked
about alone afterwards.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from benchmarks.commands import parser_of

from slotwise.version import __version__

SLOTWISE, VLLM = "slotwise", "vllm"
WORDS = (
    "card", "charged", "twice", "order", "ticket", "reply", "customer", "billing", "shipping", "refund", "account",
    "login", "password", "delivery", "late", "broken", "box", "invoice", "paid")
STATE_WORDS, QUESTIONS, ROUNDS, CLIENTS, STATES = 1200, 16, 8, 8, 16
PORT, MODEL, LONGEST = 8971, "m", 8192
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
PATIENCE = 300  # seconds for a start

Questions = dict[str, dict[str, Any]]


def questions_of(count: int) -> Questions:
    """Returns questions of all three types in turn."""
    kinds: list[dict[str, Any]] = [
        {"type": "choice", "instructions": "Which team should handle part {}?",
         "criteria": {"billing": "payments", "shipping": None, "security": None}},
        {"type": "noul", "instructions": "Is part {} urgent?"},
        {"type": "score", "instructions": "How upset is the customer in part {}?",
         "criteria": ["calm", "annoyed", "furious"]}]
    chosen = [kinds[number % len(kinds)] for number in range(count)]
    return {f"q{number}": one | {"instructions": one["instructions"].format(number)}
            for number, one in enumerate(chosen)}


@contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[httpx.Client]:
    """Runs a server until the context ends."""
    with log.open("w") as told, httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=PATIENCE) as client:
        process = subprocess.Popen(command, stdout=told, stderr=told, env=os.environ | ENVIRONMENT)
        try:
            for _ in range(2 * PATIENCE):
                if process.poll() is not None:
                    raise SystemExit(f"{command[0]} ended: see {log}")
                try:
                    if client.get("/health").status_code == httpx.codes.OK:
                        break
                except httpx.TransportError:
                    time.sleep(0.5)
            yield client
        finally:
            process.terminate()
            process.wait(PATIENCE)


def measured(client: httpx.Client) -> dict[str, Any]:
    """Returns what the server took."""
    draw, every = random.Random(1), questions_of(QUESTIONS)

    def state() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(STATE_WORDS))

    def ask(about: str, questions: Questions = every) -> tuple[float, dict[str, Any]]:
        begun = time.perf_counter()
        response = client.post("/v1/systemone", json={"state": about, "questions": questions})
        response.raise_for_status()
        return time.perf_counter() - begun, response.json()

    for _ in range(2):
        ask(state())
    first, again, alone = [], [], []
    for _ in range(ROUNDS):
        about = state()
        first.append(ask(about)[0])
        again.append(ask(about)[0])
        alone.append(ask(state(), {"q0": every["q0"]})[0])
    states = [state() for _ in range(STATES)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [answer for _, answer in pool.map(ask, states)]
    seconds = time.perf_counter() - begun
    same = sum(ask(about)[1]["answers"] == answer["answers"] for about, answer in zip(states, answers, strict=True))
    return {"first_s": median(first), "again_s": median(again), "one_question_s": median(alone),
            "decisions_per_s": STATES * QUESTIONS / seconds, "same": same, "states": STATES,
            "input_tokens": answers[0]["usage"]["input_tokens"]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="a checkpoint of Qwen3")
    parser.add_argument("--vllm", metavar="PROGRAM", help="vLLM's command")
    parser.add_argument("--output", type=Path, help="write the result to this file, as JSON")
    options = parser.parse_args()
    served = [options.folder, "--served-model-name", MODEL, "--port", str(PORT), "--max-model-len", str(LONGEST)]
    commands = {SLOTWISE: [str(Path(__file__).parents[1] / ".venv" / "bin" / "slotwise"), "serve", *served]}
    if options.vllm:
        commands[VLLM] = [options.vllm, "serve", *served]
    log, engines = Path("/tmp") / f"decisions-{time.time_ns()}.log", dict[str, Any]()
    for engine, command in commands.items():
        with serving(command, log) as client:
            engines[engine] = measured(client) | {"version": client.get("/version").json()["version"]}
            print(engine, json.dumps(engines[engine]), flush=True)
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        options.output.write_text(json.dumps({
            "date": time.strftime("%Y-%m-%d"), "commit": commit.stdout.strip(), "version": __version__,
            "processor": _processor(), "engines": engines}, indent=1) + "\n")


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else ""


if __name__ == "__main__":
    main()
