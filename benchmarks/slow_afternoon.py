"""A slow afternoon, its explanation, the what-if, the change while the server runs, and the afternoon after.

A server of few slots gets many short and few long answers, at four fifths of the load that it can bear, under the
default policy.  From its event log come the explanation of a request that waited long, and the replays under other
policies.  The best of them is set by `PUT /admin/scheduling`, and the same traffic, with other prompts, comes again.
All figures are those of the log, which is what the engine saw.

usage: python -m benchmarks.slow_afternoon --json FILE [MODEL]       (about two minutes; nothing else may run)
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.reliability.server import serving

from slotwise.bench.client import Phrasing, Target
from slotwise.bench.results import environment, write_json
from slotwise.bench.serving import Measured, measure, resolve
from slotwise.observe.event_log import Entry, read_file
from slotwise.observe.explain import explain
from slotwise.observe.fold import gather
from slotwise.observe.step_view import times_of
from slotwise.simulate.figures import Objectives, figures
from slotwise.simulate.recorded import read_recording
from slotwise.simulate.requests import SimulatedRequest
from slotwise.simulate.what_if import ALL, what_if
from slotwise.workload.arrivals import Closed, Poisson
from slotwise.workload.lengths import LogNormal, Uniform
from slotwise.workload.requests import Recipe, Workload, generate

SLOTS = 4
LENGTHS = Uniform(20, 120), LogNormal(24, 1.2, 400)  # prompts, outputs
LOAD = 0.8  # of the requests a second that a closed loop is served: nearer to 1 an error of pace decides the waits
POLICIES = ("shortest", "deadline", "fair")
KEY = "operator"
TTFT = 0.25  # seconds; the objective


def slow_requests(found: Mapping[str, SimulatedRequest]) -> list[str]:
    """Returns the ids of requests by their wait for a first token, the longest first."""
    return sorted(found, key=lambda name: found[name].ttft or 0.0, reverse=True)


def explained(entries: Sequence[Entry], request_id: str) -> dict[str, Any]:
    timeline = next(one for one in gather(entries).values() if one.request.id == request_id)
    found = explain(timeline, entries, times_of(entries)).as_json()
    return {name: found[name] for name in ("number", "prompt_tokens", "completion_tokens", "total_ms", "parts")}


def set_policy(url: str, policy: str) -> None:
    request = urllib.request.Request(
        f"{url}/admin/scheduling", json.dumps({"scheduling_policy": policy}).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}, method="PUT")
    urllib.request.urlopen(request).close()


def send(url: str, workload: Workload) -> Measured:
    target, vocab_size = resolve(Target(url))
    return measure(target, workload, Phrasing(vocab_size, hidden_lengths=True), num_warmups=2)


def bearable(model: Sequence[str], trial: int) -> float:
    """Returns the requests a second that a closed loop of as many users as slots is served."""
    with serving(*model, "--max-num-seqs", str(SLOTS)) as server:
        return trial / send(server.url, generate(Recipe(trial, *LENGTHS, Closed(SLOTS)), 1)).duration


def run(asked: argparse.Namespace) -> dict[str, Any]:
    rate = LOAD * bearable(asked.model, asked.trial)
    afternoon = generate(Recipe(round(rate * asked.seconds), *LENGTHS, Poisson(rate)), 2)
    with tempfile.TemporaryDirectory() as folder, serving(
            *asked.model, "--event-log", f"{folder}/log", "--max-num-seqs", str(SLOTS), "--admin-api-key", KEY,
            ) as server:
        send(server.url, afternoon)
        entries = list(read_file(f"{folder}/log"))
        answers = {policy: what_if(entries, {"scheduling_policy": policy}, Objectives(TTFT)) for policy in POLICIES}
        policy = max(answers, key=lambda one: answers[one]["groups"][ALL]["what_if"]["goodput"])
        _, recording = read_recording(entries)
        slow = slow_requests(recording.measured)
        name = slow[len(slow) // 20]
        counterfactual = what_if(entries, {"scheduling_policy": policy}, Objectives(TTFT), name)["request"]
        set_policy(server.url, policy)
        send(server.url, replace(afternoon, seed=3))
        _, both = read_recording(read_file(f"{folder}/log"))
    after = [one for name, one in both.measured.items() if name not in recording.measured]
    return {
        "version": 1, "environment": environment(), "rate": rate, "requests": len(afternoon.requests), "slots": SLOTS,
        "objective_s": TTFT, "policy": policy, "explained": explained(entries, name), "counterfactual": counterfactual,
        "what_if": {one: answer["groups"][ALL] for one, answer in answers.items()},
        "after": figures(after, Objectives(TTFT)).as_json()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", help="a checkpoint (default: the built-in model)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of an afternoon")
    parser.add_argument("--trial", type=int, default=60, help="requests of the closed loop that finds the load")
    parser.add_argument("--json", required=True, type=Path)
    asked = parser.parse_args()
    result = run(asked)
    write_json(str(asked.json), result)
    runs = result["what_if"][result["policy"]]
    for name in ("ttft_p50", "ttft_p99", "itl_p99", "goodput"):
        print(f"{name:10} measured {runs['measured'][name]:8.3f}  replayed {runs['replayed'][name]:8.3f}  "
              f"{result['policy']} {runs['what_if'][name]:8.3f}  the afternoon after {result['after'][name]:8.3f}")


if __name__ == "__main__":
    main()
