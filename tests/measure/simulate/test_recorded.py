"""A recorded engine and the simulator: fed the engine's times, the simulator makes the same plans, step for step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from support.toy import EOS, VOCAB, next_token

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.policy_settings import POLICIES, Ordering
from slotwise.core.record import StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SLO, SchedulerLimits
from slotwise.core.speculation.proposer import proposer_of
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Command, EngineInfo, Finish
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.pace import each_step
from slotwise.measure.simulate.recorded import read_recording
from slotwise.measure.simulate.simulator import Server, simulate
from slotwise.observe.event_log import Entry, Run, decode
from slotwise.observe.recorder import Recorder

MS = 1_000_000
LIMITS = SchedulerLimits(  # requests are preempted again and again
    max_model_len=64, num_blocks=20, block_size=4, max_num_seqs=5, max_num_batched_tokens=24,
    enable_prefix_caching=True, watermark_blocks=1, max_passes=2, max_stall_ms=9.0)
PREFIX = list(range(1, 13))


class Lines:
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def write(self, line: bytes) -> None:
        self.entries.append(decode(line))


def commands(draw: random.Random, number: int) -> list[tuple[int, Command]]:
    """Requests, some with a shared prefix and some whose clients leave, in nanoseconds of one clock."""
    found: list[tuple[int, Command]] = []
    for index in range(number):
        at = draw.randrange(1, 300 * MS)
        prompt = PREFIX * draw.randrange(2) + [draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 20))]
        params = SamplingSpec(temperature=0.0, max_tokens=draw.randrange(1, 20), ignore_eos=draw.random() < 0.5)
        slo = SLO(f"t{index % 3}", priority=draw.randrange(-2, 3))
        spec = RequestSpec(prompt, params, index, slo=slo, queue_timeout=draw.choice([0.0, 0.2]))
        found.append((at, Add(index, spec)))
        if draw.random() < 0.15:
            found.append((at + draw.randrange(60 * MS), Finish(index, "abort")))
    return sorted(found, key=lambda one: one[0])


def recorded(seed: int, policy: str, speculation: Speculation | None = None) -> list[Entry]:
    """Returns the log of an engine whose steps and pauses take random times."""
    draw, file = random.Random(seed), Lines()
    now = MS
    recorder = Recorder(clock=lambda: now)
    recorder.write_to(file)
    scheduling = Scheduling(Batching(), Ordering(policy), max_num_seqs=5, max_num_batched_tokens=24, max_stall_ms=9.0)
    times = StepTimeModel()
    scheduler = Scheduler(LIMITS, scheduling.discipline(), scheduling.policy(times), times,
                          proposer_of(speculation, times))

    class Slow(FakeExecutor):
        def collect(self):  # type: ignore[no-untyped-def]
            nonlocal now
            now += draw.randrange(2 * MS, 9 * MS)
            return super().collect()

    engine = Engine(scheduler, Slow(4, next_token), lambda: now, (EOS,), scheduling=scheduling)
    recorder.started(EngineInfo(
        "toy", "cpu", "none", VOCAB, LIMITS, scheduling, (EOS,), speculation=speculation))
    coming = commands(draw, 40)
    while coming or engine.has_work:
        plans_at = now + draw.randrange(2 * MS) if engine.has_work else max(now, coming[0][0])
        while coming and coming[0][0] <= plans_at:
            at, command = coming.pop(0)
            now = max(now, at)
            recorder.commanded(command, now)
            engine.handle(command)
        now = plans_at
        recorder.stepped(engine.step())
    return file.entries


@dataclass
class FedPace:
    """The times that a log has, one step after the other."""

    steps: list[StepRecord]
    at: int = 0

    def step(self, work: Work, at: float = 0.0) -> float:
        self.at += 1
        return (self.steps[self.at - 1].ended_ns - self.steps[self.at - 1].inputs.planned[0]) * 1e-9

    def decode_steps(self, work: Work, at: float = 0.0) -> Iterator[float]:
        return each_step(self, work, at)

    def predicted(self, work: Work) -> float:
        raise AssertionError("the scheduler learns, as the recorded one did")

    def least(self, work: Work) -> float:
        return 0.0

    def between(self) -> float:
        return (self.steps[self.at].inputs.planned[0] - self.steps[self.at - 1].ended_ns) * 1e-9 if self.at else 0.0


@pytest.mark.parametrize("drafts", [None, Speculation("suffix", prompt_lookup_min=1)], ids=["plain", "suffix"])
@pytest.mark.parametrize("policy", POLICIES)
def test_fed_the_times_of_a_log_the_plans_are_the_same_step_for_step(policy: str, drafts: Speculation | None):
    entries = recorded(7, policy, drafts)
    steps = [entry for entry in entries if isinstance(entry, StepRecord)]
    setup, recording = read_recording(entries)
    file = Lines()
    recorder = Recorder(clock=lambda: 0)
    recorder.write_to(file)
    fed = replace(setup, pace=FedPace(steps), learns=True, max_queued=(1000, 1_000_000))
    requests = simulate(recording.commands, [Server(fed, recording.outputs, [recorder])])
    made = [entry for entry in file.entries if isinstance(entry, StepRecord)]
    assert len(made) == len(steps) > 50
    for simulated, logged in zip(made, steps, strict=True):
        for field in ("request_ids", "slots", "starts", "counts", "new_blocks", "refused", "stop", "admitted",
                      "preempted", "drafts"):
            assert getattr(simulated.plan, field) == getattr(logged.plan, field), (logged.step, field)
        assert (simulated.tokens, simulated.ended) == (logged.tokens, logged.ended), logged.step
        assert simulated.counters.num_free_blocks == logged.counters.num_free_blocks
    assert any(step.preempted for step in steps) and any(step.plan.refused for step in steps)
    assert any(step.plan.drafts for step in steps) == (drafts is not None)
    assert {name: one.reason for name, one in requests.items()} == {
        name: one.reason for name, one in recording.measured.items()}


def test_a_recording_replayed_at_its_learned_pace_is_near_what_was_measured():
    setup, recording = read_recording(recorded(3, "fcfs"))
    requests = simulate(recording.traffic, [Server(setup, recording.outputs)])
    served = [name for name, one in recording.measured.items()
              if one.reason in ("stop", "length") and requests[name].reason in ("stop", "length")]
    assert len(served) > 25
    for name in served:
        assert len(requests[name].token_times) == len(recording.measured[name].token_times)
    last, measured = (max(one.ended for one in found.values()) for found in (requests, recording.measured))
    assert last == pytest.approx(measured, rel=0.3)


def objection_of(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as found:
        call()
    return str(found.value)


def test_a_log_without_an_engine_or_without_steps_is_refused():
    entries = recorded(3, "fcfs")
    assert "engine's start" in objection_of(lambda: read_recording(entries[1:]))
    alone = [entry for entry in entries if isinstance(entry, Run)]
    assert "no steps" in objection_of(lambda: read_recording(alone))


def test_a_setup_changes_as_a_server_does_and_refuses_what_it_would():
    setup, _ = read_recording(recorded(3, "fcfs"))
    changed = setup.changed({"max_num_seqs": 9, "scheduling_policy": "shortest"})
    assert changed.limits.max_num_seqs == 9 and changed.limits.num_blocks == LIMITS.num_blocks
    assert "there is no scheduling setting" in objection_of(lambda: setup.changed({"slots": 3}))
