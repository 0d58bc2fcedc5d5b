"""A slow afternoon, its explanation, the what-if, the change while the server runs, and the afternoon after.

A server has been left with few of its slots in use, and requests come somewhat faster than these serve them.  From
its event log come the explanation of a request that waited long, and the replays under other settings.  The best of
them is set by `PUT /admin/scheduling`, and the same traffic, with other prompts, comes again.  All figures are those of
the log, which is what the engine saw.

usage: python -m benchmarks.slow_afternoon --json FILE [MODEL]       (about three minutes; nothing else may run)
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.reliability.server import serving
from benchmarks.simulator import SETTLED

from slotwise.bench.load_generator import BenchTarget, LoadResult, Phrasing, measure, resolve
from slotwise.bench.results import environment, write_json
from slotwise.observe.event_log import Command, Entry, read_file
from slotwise.observe.explain import explain
from slotwise.observe.fold import gather
from slotwise.observe.step_view import times_of
from slotwise.simulate.figures import LatencyLimits, SimulatedRequest, figures
from slotwise.simulate.recorded import read_recording
from slotwise.simulate.what_if import ALL, MEASURED, REPLAYED, WHAT_IF, what_if
from slotwise.workload.distributions import Closed, LogNormal, Poisson, Uniform
from slotwise.workload.workloads import Recipe, Workload, generate

SLOTS = 16  # made at the start
BEFORE = {"max_num_seqs": 4}
OTHERS: tuple[Mapping[str, Any], ...] = (
    {"scheduling_policy": "shortest"}, {"max_num_seqs": 8}, {"max_num_seqs": 16},
    {"max_num_seqs": 16, "scheduling_policy": "shortest"})
LENGTHS = Uniform(20, 120), LogNormal(24, 1.2, 400)  # prompts, outputs
LOAD = 1.2  # of the requests a second that a closed loop of as many users as slots in use is served
KEY = "operator"
TTFT = 0.5  # seconds; the objective


def slow_requests(found: Mapping[str, SimulatedRequest]) -> list[str]:
    """Returns the ids of requests by their wait for a first token, the longest first."""
    return sorted(found, key=lambda name: found[name].ttft or 0.0, reverse=True)


def explained(entries: Sequence[Entry], request_id: str) -> dict[str, Any]:
    timeline = next(one for one in gather(entries).values() if one.request.id == request_id)
    found = explain(timeline, entries, times_of(entries)).as_json()
    return {name: found[name] for name in ("number", "prompt_tokens", "completion_tokens", "total_ms", "parts")}


def configure(url: str, changes: Mapping[str, Any]) -> None:
    request = urllib.request.Request(
        f"{url}/admin/scheduling", json.dumps(changes).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}, method="PUT")
    urllib.request.urlopen(request).close()


def send(url: str, workload: Workload) -> LoadResult:
    target, vocab_size = resolve(BenchTarget(url))
    return measure(target, workload, Phrasing(vocab_size, hidden_lengths=True), num_warmups=2)


def bearable(url: str, trial: int) -> float:
    """Returns the requests a second that a closed loop of as many users as slots in use is served."""
    closed = generate(Recipe(trial, *LENGTHS, Closed(BEFORE["max_num_seqs"])), 1)
    send(url, closed)  # sizes of steps that were not met
    return trial / send(url, closed).duration


def asked_of(entries: Sequence[Entry]) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """Returns the answers to each what-if, and the changes of the one with the most goodput."""
    answers = [{"changes": changes, **what_if(entries, changes, LatencyLimits(TTFT))["groups"][ALL]}
               for changes in OTHERS]
    return answers, max(answers, key=lambda one: one[WHAT_IF]["goodput"])["changes"]


def since(log: str, number: int) -> list[Entry]:
    """Returns the entries of an event log that say how the engine began, and those from `number` on."""
    entries = list(read_file(log))
    return [entries[0], *[one for one in entries[1:number] if isinstance(one, Command) and one.scheduling],
            *entries[number:]]


def run(asked: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, serving(
            *asked.model, "--event-log", f"{folder}/log", "--max-num-seqs", str(SLOTS), "--admin-api-key", KEY,
            "--speculative-config", '{"method": "none"}') as server:
        configure(server.url, BEFORE)
        rate = LOAD * bearable(server.url, asked.trial)
        afternoon = generate(Recipe(round(rate * asked.seconds), *LENGTHS, Poisson(rate)), 2)
        time.sleep(SETTLED)
        begin = sum(1 for _ in read_file(f"{folder}/log"))
        send(server.url, afternoon)
        time.sleep(SETTLED)
        entries = since(f"{folder}/log", begin)
        answers, best = asked_of(entries)
        _, recording = read_recording(entries)
        slow = slow_requests(recording.measured)
        name = slow[len(slow) // 20]
        counterfactual = what_if(entries, best, LatencyLimits(TTFT), name)["request"]
        configure(server.url, best)
        end = sum(1 for _ in read_file(f"{folder}/log"))
        send(server.url, replace(afternoon, seed=3))
        time.sleep(SETTLED)
        _, after = read_recording(since(f"{folder}/log", end))
    return {
        "version": 2, "environment": environment(), "rate": rate, "requests": len(afternoon.requests), "slots": SLOTS,
        "before": BEFORE, "objective_s": TTFT, "best": best, "explained": explained(entries, name),
        "counterfactual": counterfactual, "what_if": answers,
        "after": figures(list(after.measured.values()), LatencyLimits(TTFT)).as_json()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", help="a checkpoint (default: the built-in model)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of an afternoon")
    parser.add_argument("--trial", type=int, default=80, help="requests of the closed loop that finds the load")
    parser.add_argument("--json", required=True, type=Path)
    asked = parser.parse_args()
    result = run(asked)
    write_json(str(asked.json), result)
    for answer in result["what_if"]:
        print(answer["changes"])
        for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "goodput"):
            print(f"  {name:10} " + "  ".join(f"{which} {answer[which][name]:8.3f}" for which in (
                MEASURED, REPLAYED, WHAT_IF)))
    print(f"set {result['best']}; the afternoon after: " + ", ".join(
        f"{name} {value:.3f}" for name, value in result["after"].items()))


if __name__ == "__main__":
    main()
