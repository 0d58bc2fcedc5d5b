"""Workloads, and the two worlds that serve them: a real server, or its engine on a virtual clock.

Both worlds return the same kind of outcome.  A request to a real server has a connection of its own, with as little
work as possible: the load generator shares the server's processors, and a flood is thousands of requests.  Workloads
are the Azure conversation trace, scaled, and bursty arrivals of log-normal lengths.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import uvloop
from benchmarks.server import serving

from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SLO, SchedulerLimits, Tier
from slotwise.core.step_time import Work
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add
from slotwise.measure.bench.load_generator import BenchTarget, Client, LoadRun, Phrasing, open_session, resolve
from slotwise.measure.bench.measures import COMPLETED, REJECTED, RequestOutcome
from slotwise.measure.simulate.pace import CostPace
from slotwise.measure.simulate.simulator import Server, Setup, simulate
from slotwise.measure.workload.distributions import AzureOutput, AzurePrompt, Gamma, LogNormal, Poisson
from slotwise.measure.workload.trace import Trace, read_trace
from slotwise.measure.workload.workloads import Workload, WorkRequest

MOST = 1 << 20  # bytes of a response


async def post(target: BenchTarget, body: bytes) -> tuple[int, bytes]:
    """Returns status and body of the response, read as a whole.

    Raises:
        OSError: the connection failed, or was closed before the response was whole.
    """
    url = urlsplit(target.base_url + target.endpoint)
    headers = target.headers | {
        "Host": url.netloc, "Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    loop = asyncio.get_running_loop()
    received: asyncio.Future[bytes] = loop.create_future()
    request = f"POST {url.path} HTTP/1.1\r\n{head}\r\n".encode() + body
    await loop.create_connection(lambda: _Exchange(request, received), url.hostname, url.port)
    head_bytes, _, answer = (await received).partition(b"\r\n\r\n")
    status = head_bytes[9:12]
    if not status.isdigit():
        raise ConnectionResetError("no response came")
    return int(status), answer


class _Exchange(asyncio.Protocol):
    """Writes a request, and stores the response until the server closes."""

    def __init__(self, request: bytes, received: asyncio.Future[bytes]) -> None:
        self._request = request
        self._received = received
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > MOST:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._received.done():
            return
        if error is None:
            self._received.set_result(bytes(self._data))
        else:
            self._received.set_exception(error)


MAX_MODEL_LEN, BLOCK_SIZE = 1024, 64  # of the built-in model, and of its cache on a CPU
NOISE = 0.04  # deviation of a step's logarithm
LIMIT = 400.0  # seconds after which a real run is given up
WARM_UP = 60  # requests before a run: hundreds of steps, half a minute of a model of 135 million weights on two cores


class Ask(NamedTuple):
    """One request: its arrival, the lengths of prompt and output, and its objectives."""

    at: float  # seconds
    num_prompt: int  # tokens
    num_output: int
    slo: SLO = SLO()
    max_tokens: int = 0  # of the request; 0: the longest output of all requests
    whole: bool = False  # not streamed: a client's reads cost the server's processors


@dataclass(frozen=True)
class Setting:
    """The options of a server, by `EngineConfig`'s names, and its tiers."""

    options: Mapping[str, Any] = field(default_factory=dict)
    tiers: tuple[Tier, ...] = ()


def workload_of(asks: Sequence[Ask], seed: int) -> Workload:
    longest = max(ask.num_output for ask in asks)
    requests = tuple(WorkRequest(number, ask.at, ask.num_prompt, ask.num_output) for number, ask in enumerate(asks))
    return Workload(requests, longest, 0, seed)


# -- on a virtual clock --------------------------------------------------------------------------------------------


def cost_of(seed: int):
    """Returns noisy step times like those of the built-in model on two cores."""
    draw = random.Random(seed)

    def cost(work: Work) -> float:
        plain = 2e-3 + 45e-6 * work.tokens + 150e-6 * work.rows + 3e-7 * work.context + 4e-8 * work.pairs
        return plain * draw.lognormvariate(0, NOISE)

    return cost


def simulated(asks: Sequence[Ask], setting: Setting, seed: int) -> list[RequestOutcome]:
    config = EngineConfig.of(model="", tiers=setting.tiers, **{"max_num_batched_tokens": 512, **setting.options})
    blocks = config.max_num_seqs * MAX_MODEL_LEN // BLOCK_SIZE
    limits = SchedulerLimits(
        max_model_len=MAX_MODEL_LEN, num_blocks=blocks, block_size=BLOCK_SIZE, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens, watermark_blocks=blocks // 100,
        max_passes=16)
    longest = max(ask.num_output for ask in asks)
    arrivals = []
    for number, ask in enumerate(asks):
        params = SamplingSpec(max_tokens=ask.max_tokens or longest, ignore_eos=True)
        slo = _of_tier(ask.slo, setting)
        arrivals.append((ask.at, Add(number, RequestSpec(
            [5] * ask.num_prompt, params, number, slo=slo, forced_length=ask.num_output))))
    unbounded = (len(asks) + 1, 1 << 40)
    setup = Setup(limits, config.scheduling(), CostPace(cost_of(seed)), max_queued=unbounded, learns=True)
    lives = simulate(arrivals, [Server(setup)])
    return [
        RequestOutcome(number, REJECTED if (life := lives[number]).reason == "shed" else COMPLETED, ask.at, ask.at,
                tuple(life.token_times), life.ended, ask.num_prompt, len(life.token_times), life.reason)
        for number, ask in enumerate(asks)]


def _of_tier(slo: SLO, setting: Setting) -> SLO:
    """Returns `slo` with the tier's objectives where it has none of its own, as the server resolves them."""
    tier = next((tier for tier in setting.tiers if tier.name == slo.tier), None)
    if tier is None:
        return slo
    return SLO(slo.tenant, slo.tier, slo.priority or tier.priority, slo.ttft or tier.ttft,
               slo.tpot or tier.tpot)


# -- on a real server ----------------------------------------------------------------------------------------------


def real(asks: Sequence[Ask], setting: Setting, seed: int, model: str = "") -> list[RequestOutcome]:
    """Runs `slotwise serve`, by default with the built-in model.  A tenant is a key, within a tier the tier's key."""
    tenants = sorted({ask.slo.tenant for ask in asks if ask.slo.tenant})
    with ExitStack() as stack:
        arguments = [model] if model else []
        arguments += [word for name, value in setting.options.items() for word in _argument(name, value)]
        for tenant in tenants:
            arguments += ["--api-key", _key(tenant)]
        if setting.tiers:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".toml"))
            file.write("\n".join(_toml(tier) for tier in setting.tiers))
            file.flush()
            arguments += ["--tiers", file.name]
        server = stack.enter_context(serving(
            "--max-num-queued-reqs", "100000", "--max-num-queued-tokens", "100000000", *arguments))
        target, vocab_size = resolve(BenchTarget(server.url, api_key=_key(tenants[0]) if tenants else ""))
        _drive(target, [Ask(0.05 * n, 200 if n % 3 else 900, 16, SLO(tenants[0] if tenants else ""))
                        for n in range(WARM_UP)], vocab_size, seed + 1)  # step times are learned
        return _drive(target, asks, vocab_size, seed)


def _drive(target: BenchTarget, asks: Sequence[Ask], vocab_size: int, seed: int) -> list[RequestOutcome]:
    workload, phrasing = workload_of(asks, seed), Phrasing(vocab_size, hidden_lengths=True)
    load = LoadRun(workload, lambda request: _body(phrasing.body(target, workload, request), asks[request.number]))

    async def run() -> None:
        async with open_session() as session:
            clients: dict[str, Client] = {}
            for tenant in {ask.slo.tenant for ask in asks}:
                clients[tenant] = Client(session, _target(target, tenant), load.clock)

            async def send(body: bytes, reply: RequestOutcome) -> None:
                ask = asks[reply.number]
                if ask.whole:
                    await _take_whole(_target(target, ask.slo.tenant), body, reply)
                    reply.ended = load.clock()
                else:
                    await clients[ask.slo.tenant].complete(body, reply)

            await asyncio.wait_for(load.run(send), LIMIT)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the cores are the server's
        runner.run(run())
    for outcome in load.outcomes:
        if outcome.status != COMPLETED and not outcome.error.startswith("503"):
            raise RuntimeError(f"a request was not served: {outcome.error}")
    return sorted(load.outcomes, key=lambda outcome: outcome.number)


def _target(target: BenchTarget, tenant: str) -> BenchTarget:
    return BenchTarget(target.base_url, target.endpoint, target.model, _key(tenant) if tenant else "")


async def _take_whole(target: BenchTarget, body: bytes, reply: RequestOutcome) -> None:
    status, text = await post(target, body)
    answer = msgspec.json.decode(text)
    reply.status = COMPLETED if status == 200 else REJECTED
    if reply.status == COMPLETED:
        reply.num_prompt, reply.num_output = (answer["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion"))
    else:
        reply.error = f"{status}: {answer['error']['message']}"


def _body(body: bytes, ask: Ask) -> bytes:
    slo = ask.slo
    extras: dict[str, Any] = {"stream": False, "stream_options": None} if ask.whole else {}
    if slo.tier:
        extras["service_tier"] = slo.tier
    if slo.priority:
        extras["priority"] = slo.priority
    if slo.ttft is not None:
        extras["ttft_ms"] = 1000 * slo.ttft
    if slo.tpot is not None:
        extras["tpot_ms"] = 1000 * slo.tpot
    return msgspec.json.encode(msgspec.json.decode(body) | extras) if extras else body


def _key(tenant: str) -> str:
    return f"key-of-{tenant}-{os.getpid()}"


def _argument(name: str, value: object) -> list[str]:
    option = "--" + name.replace("_", "-")
    return [option] if value is True else [option, str(value)]


def _toml(tier: Tier) -> str:
    told = {"name": tier.name, "priority": tier.priority, "weight": tier.weight, "slots": tier.slots}
    told |= {f"{name}_ms": 1000 * value for name, value in (("ttft", tier.ttft), ("tpot", tier.tpot)) if value}
    return "[[tier]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in told.items())


SCALE = 1 / 8  # of the trace's lengths, for a small machine
MAX_PROMPT, MAX_OUTPUT = 700, 300


def azure(path: Path | None, count: int, rate: float, seed: int) -> list[Ask]:
    """Returns requests of the trace with its bursts, `rate` per second on average; without a file, of its quantiles."""
    if path is None:
        inputs, outputs = AzurePrompt(SCALE), AzureOutput(SCALE)
        drawn = random.Random(seed)
        times = Poisson(rate).times(drawn, count)
        return [Ask(at, _cut(inputs.draw(drawn), MAX_PROMPT), outputs.draw(drawn)) for at in times]
    trace = read_trace(path, SCALE, limit=count)
    return [Ask(at, _cut(prompt, MAX_PROMPT), _cut(output, MAX_OUTPUT))
            for at, (prompt, output) in zip(_paced(trace, rate), trace.lengths, strict=True)]


def _paced(trace: Trace, rate: float) -> list[float]:
    """Returns the trace's times, scaled to `rate` requests per second."""
    scale = len(trace.times) / rate / max(trace.times[-1], 1e-9)
    return [at * scale for at in trace.times]


def bursty(count: int, rate: float, seed: int, sigma: float = 1.0) -> list[Ask]:
    """Returns requests with gamma-distributed gaps (coefficient of variation 3) and independent lengths."""
    drawn = random.Random(seed)
    times = Gamma(rate, 3.0).times(drawn, count)
    inputs, outputs = LogNormal(64, sigma, MAX_PROMPT), LogNormal(24, sigma, MAX_OUTPUT)
    return [Ask(at, inputs.draw(drawn), outputs.draw(drawn)) for at in times]


def _cut(length: int, most: int) -> int:
    return max(1, min(length, most))
