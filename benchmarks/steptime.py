"""How good the step-time model is, and whether explanations name the right decode time: against a real model.

Three workloads, each learned from cold.  Of each: the error of predictions made after 200 steps; then requests of it
are run once more with nobody else, and what the explanation said that their decode would take alone is held against it.

usage: python benchmarks/steptime.py [--model FOLDER] [--solo N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from slotwise import builtin
from slotwise.bench.measures import percentile
from slotwise.bench.results import environment
from slotwise.compose.engine import build_engine
from slotwise.core.params import SamplingParams
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add
from slotwise.observe.explain import Story, explain
from slotwise.observe.facts import gather
from slotwise.observe.log import Step
from slotwise.observe.recorder import Recorder
from slotwise.observe.ring import Ring
from slotwise.observe.steptime import StepTimes, work_of
from slotwise.workload import arrivals, lengths
from slotwise.workload.requests import Recipe, Workload, WorkRequest, generate

LEARNING = 200  # steps before predictions count
FEWEST_DECODED = 8  # tokens of a request that is run alone
NS = 1e-9


class Lab:
    """An engine in this process, its event log, and a model of its steps."""

    def __init__(self, model: str) -> None:
        self.engine, self.info = build_engine(EngineConfig(model=model, enable_prefix_caching=False))
        self._recorder = Recorder(Ring(1 << 40))
        self._recorder.started(self.info)
        self._num_requests = 0
        self.steps: list[Step] = []  # of the last run

    def run(self, workload: Workload, requests: Iterable[WorkRequest], times: StepTimes) -> dict[int, Story]:
        """Run `requests` of `workload` and teach `times`: their stories, by their numbers in the workload."""
        recorder, pending = self._recorder, sorted(requests, key=lambda request: request.arrives_at or 0.0)
        numbers, position, first, began = [], recorder.ring.end, self._num_requests, time.monotonic()
        while pending or self.engine.has_work:
            while pending and (pending[0].arrives_at or 0.0) <= time.monotonic() - began:
                request = pending.pop(0)
                numbers.append(request.number)
                self._num_requests += 1
                prompt = workload.prompt_ids(request, self.info.vocab_size)
                params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
                command = Add(f"r{self._num_requests}-0", prompt, params, seed=0)
                recorder.commanded(command, time.monotonic_ns())
                self.engine.handle(command)
            if self.engine.has_work:
                record = self.engine.step()
                recorder.stepped(record)
                times.stepped(record)
            else:
                time.sleep(0.001)
        entries = recorder.ring.entries()
        facts = gather(entries)
        stories = [explain(facts[number], entries, times) for number in range(first, self._num_requests)]
        self.steps = [entry for entry in entries[position:] if isinstance(entry, Step)]
        return dict(zip(numbers, stories, strict=True))


class Outcome(NamedTuple):
    name: str
    num_steps: int
    errors: list[float]  # of predictions made after LEARNING steps, relative
    ratios: list[float]  # decode alone, as explained over as measured


def judge(lab: Lab, name: str, workload: Workload, num_solo: int) -> Outcome:
    times = StepTimes()
    stories = lab.run(workload, workload.requests, times)
    errors, again, end, steps = [], StepTimes(), 0, lab.steps
    for count, step in enumerate(steps):
        work, began = work_of(step.starts, step.counts, step.padding), max(step.started_ns, end)
        end = step.ended_ns
        if count >= LEARNING and work.rows:
            errors.append(again.seconds(work) / ((end - began) * NS) - 1)
        again.step(work, step.started_ns * 1e-9, step.ended_ns * 1e-9)
    crowded = [
        request for request in workload.requests
        if stories[request.number].ns("neighbours") and request.num_output >= FEWEST_DECODED]
    ratios = []
    for request in (crowded * num_solo)[:num_solo]:
        alone = WorkRequest(request.number, 0.0, request.num_prompt, request.num_output)
        (measured,) = lab.run(workload, [alone], StepTimes()).values()
        ratios.append(stories[request.number].ns("decode") / measured.ns("decode"))
    return Outcome(name, len(steps), errors, ratios)


def workloads(lab: Lab, token_s: float) -> dict[str, Workload]:
    """At once, one after the other, and long prompts beside streams, at a pace that fits a model of that speed."""
    short = lengths.parse("lognormal:64:0.8:256"), lengths.parse("lognormal:48:0.6:128")
    pace = arrivals.parse(f"poisson:{0.08 / token_s:.3g}")
    long = lab.info.limits.max_model_len * 3 // 4
    streams = [(0.0, 32, 320)] * 8 + [(40 * token_s * (1 + number), min(long, 1000), 8) for number in range(8)]
    return {
        "a burst": generate(Recipe(256, *short), seed=1),
        "arrivals": generate(Recipe(128, *short, pace), seed=2),
        "long prompts": Workload(tuple(
            WorkRequest(number, *one) for number, one in enumerate(sorted(streams))), 320)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(builtin.path()), help="a checkpoint's folder (default: the built-in)")
    parser.add_argument("--solo", type=int, default=50, help="requests run alone, in all (default: 50)")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    lab = Lab(asked.model)
    warm_up = Workload((WorkRequest(0, 0.0, 64, 48),), 48)
    lab.run(warm_up, warm_up.requests, StepTimes())
    (story,) = lab.run(warm_up, warm_up.requests, StepTimes()).values()
    given = workloads(lab, story.ns("decode") * NS / 47)
    share = -(-asked.solo // len(given))
    outcomes = [judge(lab, name, workload, share) for name, workload in given.items()]
    show(outcomes)
    if asked.json:
        told = {"model": Path(asked.model).name, "environment": environment()}
        result = told | {"workloads": [figures(outcome) for outcome in outcomes]}
        asked.json.write_text(json.dumps(result, indent=1))


def figures(outcome: Outcome) -> dict[str, Any]:
    errors = sorted(abs(error) for error in outcome.errors) or [float("nan")]
    off = sorted(abs(ratio - 1) for ratio in outcome.ratios)
    return {
        "workload": outcome.name, "steps": outcome.num_steps, "median_error": statistics.median(errors),
        "p90_error": percentile(errors, 90), "solo_runs": len(outcome.ratios),
        "decode_explained_over_measured": statistics.median(outcome.ratios), "median_off": statistics.median(off),
        "worst_off": off[-1], "within_15_percent": sum(one <= 0.15 for one in off) / len(off)}


def show(outcomes: list[Outcome]) -> None:
    rows = [figures(outcome) for outcome in outcomes]
    table = Table("", *(row["workload"] for row in rows))
    for name in list(rows[0])[1:]:
        table.add_row(name.replace("_", " "), *(
            f"{row[name]:,}" if isinstance(row[name], int) else f"{row[name]:.3f}" for row in rows))
    Console().print(table)


if __name__ == "__main__":
    main()
