"""The capacity answer beside real replicas: as many as it names, and one fewer.

    two servers, a processor each ◄── slotwise scale ◄── traffic ──► event log of one ──► simulate.capacity_search
                                                                                            │ N replicas for a trace
    trials, each of other traffic: N of the servers behind the door, and N - 1 ◄────────────┘

The event log is of traffic that keeps both servers busy, so its step times are those of replicas that share a machine.
Each trial's traffic comes at a multiple of the rate at which, by simulation, one replica bears just this traffic.  An
objective is met if that share of the requests keeps it, as their client measures.

usage: python -m benchmarks.capacity MODEL --trace CSV --json FILE      (nine minutes; nothing else may run)
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from benchmarks.reliability.server import serving
from benchmarks.simulator import SETTLED, Windows

from slotwise.bench.load_generator import BenchTarget as Address
from slotwise.bench.load_generator import Phrasing, measure, resolve
from slotwise.bench.measures import COMPLETED, RequestOutcome
from slotwise.bench.results import environment, write_json
from slotwise.observe.event_log import read_file
from slotwise.simulate.capacity_search import CapacityTarget, at_load, fewest, scaled, served
from slotwise.simulate.figures import LatencyLimits, SimulatedRequest
from slotwise.simulate.recorded import read_recording
from slotwise.simulate.simulator import Setup
from slotwise.workload.workloads import Workload

READY = re.compile(r"Ready after .* on (http://\S+)")
REPLICAS = 2
TARGET = CapacityTarget(ttft=2.0, tpot=0.15, share=0.95)
LOADS = (1.3, 1.4, 1.5, 1.6, 1.7)  # of what one replica bears of a trial's traffic
CALIBRATION, FIRST = 60, 10  # seeds of the traffic
OTHER_PROMPTS = 1000  # steps of the seed: a replica has no prompt of an earlier run in its prefix cache
WARMING = 0.4  # windows' worth of traffic before the calibration
PATIENCE = 20.0  # seconds in which a door finds its replicas
MOST = 8.0  # times the traffic's rate


@contextmanager
def door(urls: Sequence[str]) -> Iterator[str]:
    """The address of a router in front of replicas."""
    replicas = [word for url in urls for word in ("--replica-url", url)]
    with subprocess.Popen([sys.executable, "-m", "slotwise", "scale", "--port", "0", "--router", "least-unfinished",
                           *replicas], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(found[1] for line in process.stdout if (found := READY.search(line)))
            _wait_for(url, len(urls))
            yield url
        finally:
            process.terminate()


def _wait_for(url: str, number: int) -> None:
    """Waits until a door has seen `number` replicas."""
    until = time.monotonic() + PATIENCE
    while sum(one["is_up"] for one in httpx.get(f"{url}/replicas").json()["replicas"]) < number:
        if time.monotonic() > until:
            raise RuntimeError(f"the door does not see {number} replicas")
        time.sleep(0.1)


def sent(urls: Sequence[str], workload: Workload) -> list[SimulatedRequest]:
    """Returns what clients measure of a workload sent to replicas."""
    with door(urls) as url:
        address, vocab_size = resolve(Address(url))
        outcomes = measure(address, workload, Phrasing(vocab_size, hidden_lengths=True), num_warmups=2).outcomes
    return [_measured(one) for one in outcomes]


def _measured(one: RequestOutcome) -> SimulatedRequest:
    reason = "length" if one.status == COMPLETED else one.status
    return SimulatedRequest.measured(one.sent, one.token_times, one.ended, reason)


def kept(requests: Sequence[SimulatedRequest]) -> dict[str, Any]:
    """Returns whether the objective is met, and the share of requests that keep each limit."""
    limits = {"ttft": LatencyLimits(ttft=TARGET.ttft), "tpot": LatencyLimits(tpot=TARGET.tpot)}
    return {"requests": len(requests), "met": TARGET.met(requests)} | {
        name: sum(map(limit.met, requests)) / len(requests) for name, limit in limits.items()}


def bearable(workload: Workload, setup: Setup) -> float:
    """Returns of the workload's rate up to which share one simulated replica meets the objective."""
    low, high = 0.0, MOST
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if at_load(workload, setup, TARGET, 1, middle).met else (low, middle)
    return low


def trial(traffic: Workload, load: float, setup: Setup, urls: Sequence[str]) -> dict[str, Any]:
    """Asks how many replicas `load` times what one bears needs, and sends it to as many and to one fewer."""
    borne = bearable(traffic, setup)
    if not borne:
        raise RuntimeError("one simulated replica misses the objective at any load: is anything else running?")
    workload = scaled(traffic, borne * load)
    rate = len(workload.requests) / (workload.requests[-1].arrives_at or 1.0)
    needed = fewest(workload, setup, TARGET)
    found: dict[str, Any] = {"load": load, "rate": rate, "seed": workload.seed, "needed": needed, "foreseen": [
        {"replicas": count, **kept(served(workload, setup, count))} for count in (needed, needed - 1) if count]}
    if 1 < needed <= len(urls):
        found["measured"] = []
        for count in (needed, needed - 1):
            anew = replace(workload, seed=workload.seed + OTHER_PROMPTS * count)
            found["measured"].append({"replicas": count, **kept(sent(urls[:count], anew))})
        found["confirmed"] = [one["met"] for one in found["measured"]] == [True, False]
    return found


def run(asked: argparse.Namespace) -> dict[str, Any]:
    windows = Windows(asked.trace, asked.scale, asked.seconds)
    processors = sorted(os.sched_getaffinity(0))[:REPLICAS]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = [stack.enter_context(serving(
            asked.model, "--cpu-bind", str(one), "--event-log", str(folder / str(one)), "--gpu-memory-utilization",
            "0.25", "--speculative-config", '{"method": "none"}')).url for one in processors]
        warming = windows._replace(seconds=asked.seconds * WARMING)
        calibration = windows.conversations(asked.rate, CALIBRATION)
        for workload in (warming.conversations(asked.rate, CALIBRATION + 1), calibration):
            sent(urls, workload)
        time.sleep(SETTLED)
        setup, recording = read_recording(read_file(folder / str(processors[0])))
        trials: list[dict[str, Any]] = []
        result = {
            "version": 1, "environment": environment(), "trace": asked.trace.name, "length_scale": asked.scale,
            "seconds": asked.seconds, "objective": {
                "ttft_s": TARGET.ttft, "tpot_s": TARGET.tpot, "share": TARGET.share},
            "calibration_requests": len(recording.measured), "trials": trials}
        for number, load in enumerate(LOADS):
            trials.append(trial(windows.conversations(asked.rate, FIRST + number), load, setup, urls))
            print(trials[-1], flush=True)
            write_json(asked.json, result)  # what an interrupt does not take away
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--rate", type=float, default=4.0,
                        help="requests a second of the calibration, of both servers, and of traffic to scale")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a trial's traffic")
    parser.add_argument("--json", required=True)
    asked = parser.parse_args()
    result = run(asked)
    confirmed = sum(one.get("confirmed", False) for one in result["trials"])
    print(f"{confirmed} of {len(result['trials'])} confirmed")


if __name__ == "__main__":
    main()
