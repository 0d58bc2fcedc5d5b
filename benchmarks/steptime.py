"""Measures the errors of the step-time model and of explained decode times, against a real model.

There are three workloads, each on an engine of its own with the data of its warm-up and none of earlier runs.  For
each it prints the error of predictions after 200 steps.  Then it runs the workload again, and some of its requests
alone, without learning from these steps, and compares their decode time with the explained one.

A shared machine is a third faster or slower a second later.  So both kinds of run alternate, and a request counts by
its median turn.  A metronome, another engine on the same weights with one row that no model learns from, runs two steps
after every few.  Ratios are printed as measured and as `steady`: the explained time, which is typical, in beats of all
turns, the measured one in beats of its own seconds.

usage: python benchmarks/steptime.py [--model FOLDER] [--solo N] [--workload NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from slotwise import builtin
from slotwise.bench.measures import percentile
from slotwise.bench.results import environment
from slotwise.compose.engine_builder import load
from slotwise.core.params import SamplingParams
from slotwise.core.request import RequestSpec
from slotwise.core.step_time import work_of
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add, EngineInfo
from slotwise.observe.event_log import Step, decode
from slotwise.observe.explain import Explanation, explain
from slotwise.observe.fold import gather
from slotwise.observe.recorder import Recorder
from slotwise.observe.ring import Ring
from slotwise.observe.step_time import StepTimeModel, path_for, traits
from slotwise.workload.distributions import parse_arrivals, parse_lengths
from slotwise.workload.workloads import Recipe, Workload, WorkRequest, generate

LEARNING = 200  # steps before predictions count
FEWEST_DECODED = 8  # output tokens of a request that runs alone
TURNS = 3
BEAT = 4  # steps from one beat to the next
BEAT_TOKENS = 64  # by which the metronome's row grows before it restarts
NS = 1e-9
BURST, ARRIVALS, LONG = WORKLOADS = ("a burst", "arrivals", "long prompts")


class Metronome:
    """One row of an engine, whose steps measure the machine's current speed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_beats = 0
        for _ in range(BEAT_TOKENS):
            self.beat()

    def beat(self) -> float:
        """Returns the seconds of a step: the second of two, because the first runs with cold caches."""
        self._step()
        return self._step()

    def _step(self) -> float:
        if not self._engine.has_work:
            self._num_beats += 1
            params = SamplingParams(temperature=0.0, max_tokens=BEAT_TOKENS, ignore_eos=True)
            self._engine.handle(Add(f"beat{self._num_beats}-0", RequestSpec([0], params)))
        record = self._engine.step()
        return (record.ended_ns - record.started_ns) * NS


class Lab:
    """An engine in this process with its event log, without stored step times of earlier runs."""

    def __init__(self, model: str) -> None:
        config = EngineConfig(model=model, enable_prefix_caching=False)
        loaded = load(config)
        _, info = loaded.engine(config)
        path_for(traits(config, info)).unlink(missing_ok=True)
        self.engine, self.info = loaded.engine(config)
        self._metronome = Metronome(loaded.engine(replace(config, max_num_seqs=1))[0])
        self.beats: list[float] = []  # of the last run, seconds
        self._recorder = Recorder(Ring(1 << 40))
        self._recorder.started(self.info)
        self._num_requests = 0
        self._numbers: dict[int, int] = {}  # of the last run: in the log -> in the workload
        self._began = 0  # the last run: position in the log

    def run(self, workload: Workload, requests: Iterable[WorkRequest], times: StepTimeModel) -> None:
        """Runs `requests` of `workload` and trains `times`."""
        recorder, pending = self._recorder, sorted(requests, key=lambda request: request.arrives_at or 0.0)
        self._numbers, self._began, began = {}, recorder.ring.end, time.monotonic()
        self.beats, num_steps = [self._metronome.beat()], 0
        while pending or self.engine.has_work:
            while pending and (pending[0].arrives_at or 0.0) <= time.monotonic() - began:
                request = pending.pop(0)
                self._numbers[self._num_requests] = request.number
                self._num_requests += 1
                prompt = workload.prompt_ids(request, self.info.vocab_size)
                params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
                command = Add(f"r{self._num_requests}-0", RequestSpec(prompt, params))
                recorder.commanded(command, time.monotonic_ns())
                self.engine.handle(command)
            if self.engine.has_work:
                record = self.engine.step()
                recorder.stepped(record)
                times.stepped(record)
                num_steps += 1
                if num_steps % BEAT == 0:
                    self.beats.append(self._metronome.beat())
            else:
                time.sleep(0.001)

    def steps(self) -> list[Step]:
        """The steps of the last run."""
        return [entry for entry in map(decode, self._recorder.ring.lines()[self._began:]) if isinstance(entry, Step)]

    def explanations(self, times: StepTimeModel) -> dict[int, Explanation]:
        """Returns the explanations of the last run's requests, by number in the workload, predicted by `times`."""
        entries = list(map(decode, self._recorder.ring.lines()))
        facts = gather(entries)
        return {known: explain(facts[number], entries, times) for number, known in self._numbers.items()}


class Outcome(NamedTuple):
    name: str
    num_steps: int
    errors: list[float]  # of predictions made after LEARNING steps, relative
    ratios: list[float]  # decode alone, explained over measured: of each request the median of its turns
    steady: list[float]  # the same, both counted in beats


def measure(model: str, name: str, num_solo: int) -> Outcome:
    """Runs one workload, first to learn from, then in turns with those of its requests that shared steps."""
    lab = Lab(model)
    workload, times = workload_of(name, lab.info, seconds_of_a_token(lab)), StepTimeModel(lab.info.learned)
    knew = StepTimeModel(times.learned())
    lab.run(workload, workload.requests, times)
    steps, explanations = lab.steps(), lab.explanations(times)
    errors, num_steps = predicted(steps, knew), len(steps)
    alone = [
        request for request in workload.requests
        if explanations[request.number].ns("neighbours") and request.num_output >= FEWEST_DECODED][:num_solo]
    turns = [compared(lab, workload, times, alone) for _ in range(TURNS)]
    pace = statistics.median([beat for turn in turns for beat in turn.beats])
    ratios = [turn.ratios for turn in turns]
    steady = [{number: ratio * turn.solo_beats[number] / pace for number, ratio in turn.ratios.items()}
              for turn in turns]
    return Outcome(name, num_steps, errors, medians(ratios), medians(steady))


def seconds_of_a_token(lab: Lab) -> float:
    """Returns the seconds per token of a request alone; it runs twice, because an engine's first steps are cold."""
    alone = Workload((WorkRequest(0, 0.0, 64, 48),), 48)
    for _ in range(2):
        lab.run(alone, alone.requests, StepTimeModel())
    (explanation,) = lab.explanations(StepTimeModel()).values()
    return explanation.ns("decode") * NS / 47


def predicted(steps: Iterable[Step], times: StepTimeModel) -> list[float]:
    """Returns the relative errors of `times` for each step before it learns from it, after the first LEARNING."""
    errors, end = [], 0
    for count, step in enumerate(steps):
        work, began = work_of(step.starts, step.counts, step.padding), max(step.started_ns, end)
        end = step.ended_ns
        if count >= LEARNING and work.rows:
            errors.append(times.seconds(work) / ((end - began) * NS) - 1)
        times.step(work, step.started_ns * NS, step.ended_ns * NS)
    return errors


class Turn(NamedTuple):
    """The results of one turn, by the numbers of requests."""

    ratios: dict[int, float]  # decode times, explained over measured
    solo_beats: dict[int, float]  # seconds, while the request ran alone
    beats: list[float]  # seconds, of the whole turn


def compared(lab: Lab, workload: Workload, times: StepTimeModel, alone: Iterable[WorkRequest]) -> Turn:
    """Runs all requests together, then some of them alone."""
    lab.run(workload, workload.requests, times)
    turn = Turn({}, {}, lab.beats)
    explanations = lab.explanations(times)
    for request in alone:
        lab.run(workload, [replace(request, arrives_at=0.0)], StepTimeModel())
        took = lab.explanations(StepTimeModel())[request.number].ns("decode")
        turn.ratios[request.number] = explanations[request.number].ns("decode") / took
        turn.solo_beats[request.number] = statistics.median(lab.beats)
        turn.beats.extend(lab.beats)
    return turn


def medians(turns: Sequence[dict[int, float]]) -> list[float]:
    """Returns the median of every request, over the turns."""
    return [statistics.median(turn[number] for turn in turns) for number in turns[0]]


def workload_of(name: str, info: EngineInfo, token_s: float) -> Workload:
    """Returns the workload `name`, all at once, in sequence, or long prompts beside streams, at the model's pace."""
    short = parse_lengths("lognormal:64:0.8:256"), parse_lengths("lognormal:48:0.6:128")
    if name == BURST:
        return generate(Recipe(256, *short), seed=1)
    if name == ARRIVALS:
        return generate(Recipe(128, *short, parse_arrivals(f"poisson:{0.08 / token_s:.3g}")), seed=2)
    long = min(info.limits.max_model_len * 3 // 4, 1000)
    streams = [(0.0, 32, 320)] * 8 + [(40 * token_s * (1 + number), long, 8) for number in range(8)]
    return Workload(tuple(WorkRequest(number, *one) for number, one in enumerate(sorted(streams))), 320)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(builtin.path()), help="a checkpoint's folder (default: the built-in)")
    parser.add_argument("--solo", type=int, default=50, help="requests run alone, in all (default: 50)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workload", choices=WORKLOADS, help="this one alone")
    asked = parser.parse_args()
    names = [asked.workload] if asked.workload else WORKLOADS
    outcomes = [measure(asked.model, name, -(-asked.solo // len(WORKLOADS))) for name in names]
    show(outcomes)
    if asked.json:
        told = {"model": Path(asked.model).name, "environment": environment()}
        result = told | {"workloads": [figures(outcome) for outcome in outcomes]}
        asked.json.write_text(json.dumps(result, indent=1))


def figures(outcome: Outcome) -> dict[str, Any]:
    errors = sorted(abs(error) for error in outcome.errors) or [float("nan")]
    raw = {f"decode_{name}": value for name, value in spread(outcome.ratios).items()}
    return {
        "workload": outcome.name, "steps": outcome.num_steps, "median_error": statistics.median(errors),
        "p90_error": percentile(errors, 90), "solo_runs": len(outcome.ratios),
        **raw, **{f"steady_{name}": value for name, value in spread(outcome.steady).items()}}


def spread(ratios: list[float]) -> dict[str, float]:
    """Returns median, errors and the share within 15% of ratios of explained over measured decode times."""
    off = sorted(abs(ratio - 1) for ratio in ratios)
    return {
        "explained_over_measured": statistics.median(ratios), "median_off": statistics.median(off),
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
