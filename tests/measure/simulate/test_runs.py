"""Steps taken at once: the same report and the same event log, to the byte, as taken one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.toy import EOS, VOCAB

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.eviction import Retained
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.policy_settings import POLICIES, Ordering
from slotwise.core.record import Inputs, ReceivedBlocks, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.routing.routers import ROUTERS
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import EVICTION_POLICIES, SLO, SchedulerLimits
from slotwise.core.step_time import Work
from slotwise.engine.messages import Add, Command, Configure, Finish
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.figures import LatencyLimits, figures
from slotwise.measure.simulate.pace import CostPace
from slotwise.measure.simulate.simulated_routing import RoutedServers
from slotwise.measure.simulate.simulator import Server, Setup, simulate
from slotwise.measure.simulate.what_if import what_if
from slotwise.observe.event_log import decode
from slotwise.observe.recorder import Recorder

LIMITS = SchedulerLimits(
    max_model_len=64, num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=24,
    enable_prefix_caching=True, watermark_blocks=1, max_passes=2)
BATCHINGS = (Batching(), Batching(prefill="inline"), Batching(prefill="alone"), Batching("orca"), Batching("static"),
             Batching("dynamic", batch_size=2, max_wait_ms=7.0), Batching("one_at_a_time"))

requests_st = st.lists(st.tuples(
    st.integers(0, 400),  # milliseconds of its arrival
    st.integers(0, 3),  # blocks of a shared prefix
    st.integers(1, 12),  # further tokens of its prompt
    st.integers(3, 40),  # max_tokens
    st.lists(st.sampled_from([EOS, 3, 4, 5]), max_size=30),  # what it samples first, where outputs are known
    st.sampled_from([0, 0, 0, 9]),  # milliseconds after which its client leaves; 0: it stays
    st.builds(SLO, st.sampled_from(["", "a", "b"]), priority=st.integers(-1, 1),
              tpot=st.sampled_from([None, None, 0.02]), ttft=st.sampled_from([None, 0.05])),
    st.sampled_from([0.0, 0.05]),  # seconds that it may wait
), min_size=1, max_size=16)


def cost(work: Work) -> float:
    return 0.002 + 0.0001 * work.tokens + 1e-6 * work.context


class Lines:
    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line)


def traffic(drawn: Sequence[Any], *, ends: bool) -> tuple[list[tuple[float, Command]], dict[str, list[int]]]:
    """Returns commands, and the outputs of the requests."""
    found: list[tuple[float, Command]] = []
    outputs = {}
    for number, (at, shared, own, most, tokens, leaves, slo, patience) in enumerate(drawn):
        prompt = [1] * (4 * shared) + [2 + number % (VOCAB - 2)] * own
        params = SamplingSpec(max_tokens=most, ignore_eos=bool(number % 2), min_tokens=number % 3)
        found.append((at / 1000, Add(number, RequestSpec(
            prompt, params, number, slo=slo, forced_length=most // 2 if ends else 0, queue_timeout=patience,
            session=f"s{shared}", retain=4.0 * (number % 3)))))
        outputs[number] = tokens
        if leaves:
            found.append(((at + leaves) / 1000, Finish(number, "abort")))
    return sorted(found, key=lambda one: one[0]), outputs


def played(commands: Sequence[tuple[float, Command]], setup: Setup, outputs: dict[str, list[int]], *, at_once: bool):
    file, recorder = Lines(), Recorder(clock=lambda: 0, calendar=lambda: 0.0)
    recorder.write_to(file)
    server = Server(setup, outputs, [recorder], takes_runs=at_once)
    found = simulate(commands, [server])
    server.engine._scheduler.check()
    order = server.engine._scheduler.kv.pool.cached
    return found, file.lines, sorted(order._claims.values()) if isinstance(order, Retained) else []


@pytest.mark.parametrize("batching", BATCHINGS, ids=str)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests_st, st.sampled_from(POLICIES), st.sampled_from([18, 40, 200]), st.booleans(), st.booleans(),
       st.booleans(), st.sampled_from([0, 10]), st.sampled_from([None, 5.0]), st.booleans(),
       st.sampled_from(EVICTION_POLICIES))
def test_steps_taken_at_once_leave_the_same_event_log(
    batching: Batching, drawn: Sequence[Any], policy: str, blocks: int, ends: bool, known: bool, learns: bool,
    host: int, stall: float | None, caches: bool, order: str,
):
    scheduling = Scheduling(batching, Ordering(policy), max_num_seqs=4, max_num_batched_tokens=24, max_stall_ms=stall,
                            eviction_policy=order)
    limits = replace(LIMITS, num_blocks=blocks, num_host_blocks=host * caches, enable_prefix_caching=caches)
    setup = Setup(limits, scheduling, CostPace(cost), 0, (EOS,), learns=learns)
    commands, outputs = traffic(drawn, ends=ends)
    changed = Scheduling(Batching(), Ordering("shortest"), max_num_seqs=2, max_num_batched_tokens=24,
                         eviction_policy=order)
    commands = sorted([*commands, (0.2, Configure(changed))], key=lambda one: one[0])
    (fast, fast_lines, fast_claims), (slow, slow_lines, slow_claims) = (
        played(commands, setup, outputs if known else {}, at_once=at_once) for at_once in (True, False))
    assert fast_lines == slow_lines and fast_claims == slow_claims
    assert fast == slow and figures(list(fast.values())) == figures(list(slow.values()))


class GrowingPace(CostPace):
    """Tells that steps of longer contexts take longer, so that servers are left alone while they are in a run."""

    def least(self, work: Work) -> float:
        return cost(work)


@settings(max_examples=40, deadline=None)
@given(requests_st, st.integers(2, 4), st.sampled_from(POLICIES))
def test_and_the_same_choices_of_the_router(drawn: Sequence[Any], replicas: int, policy: str):
    commands, _ = traffic(drawn, ends=True)
    found = []
    for pace, at_once in ((GrowingPace(cost), True), (CostPace(cost), True), (CostPace(cost), False)):
        setup = Setup(LIMITS, Scheduling(Batching(), Ordering(policy), max_num_seqs=4, max_num_batched_tokens=24),
                      pace, max_queued=(3, 60))
        found.append(simulate(commands, [
            Server(setup, replica=number, takes_runs=at_once) for number in range(replicas)]))
    assert found[0] == found[1] == found[2]


@settings(max_examples=20, deadline=None)
@given(requests_st, st.sampled_from(sorted(ROUTERS)))
def test_and_those_of_a_router_that_servers_tell_of_themselves(drawn: Sequence[Any], router: str):
    commands, _ = traffic(drawn, ends=True)
    setup = Setup(LIMITS, Scheduling(Batching(), max_num_seqs=4, max_num_batched_tokens=24), GrowingPace(cost),
                  max_queued=(3, 60))
    found = []
    for at_once in (True, False):
        routed = RoutedServers(ROUTERS[router](0), 2, setup.pace)
        found.append(simulate(commands, [
            Server(setup, observers=[told], replica=number, takes_runs=at_once)
            for number, told in enumerate(routed.observers)], routed=routed))
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_most_steps_of_few_long_requests_are_not_planned(policy: str, monkeypatch: pytest.MonkeyPatch):
    plans = []
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda *given: plans.append(given) or schedule(*given))
    params = SamplingSpec(max_tokens=50, ignore_eos=True)
    commands = [(0.0, Add(number, RequestSpec([5] * 4, params, number))) for number in range(4)]
    scheduling = Scheduling(Batching(), Ordering(policy), max_num_seqs=4, max_num_batched_tokens=24)
    setup = Setup(replace(LIMITS, num_blocks=200), scheduling, CostPace(cost))
    server = Server(setup)
    assert all(one.num_tokens == 50 for one in simulate(commands, [server]).values())
    assert len(server.clock) >= 50 and len(plans) < 5


def test_a_what_if_changes_the_settings_that_held_last():
    commands = [(0.0, Configure(Scheduling(Batching(), max_num_seqs=2, max_num_batched_tokens=24))), *[
        (0.001 * number, Add(number, RequestSpec([5] * 4, SamplingSpec(max_tokens=9, ignore_eos=True), number)))
        for number in range(1, 9)]]
    _, lines, _ = played(commands, Setup(LIMITS, Scheduling(Batching(), max_num_seqs=4, max_num_batched_tokens=24),
                                      CostPace(cost)), {}, at_once=True)
    answer = what_if([decode(line) for line in lines], {"scheduling_policy": "shortest"}, LatencyLimits())
    assert answer["settings"]["max_num_seqs"] == 2 and answer["settings"]["scheduling_policy"] == "shortest"
    found = answer["groups"]["all requests"]
    assert found["what_if"]["ttft_p99"] == pytest.approx(found["measured"]["ttft_p99"], rel=0.2)


def test_a_what_if_about_prompts_that_other_engines_computed_is_refused():
    _, lines, _ = played([(0.0, Add(0, RequestSpec([5] * 4, SamplingSpec(max_tokens=9, ignore_eos=True))))],
                      Setup(LIMITS, Scheduling(Batching(), max_num_seqs=4, max_num_batched_tokens=24),
                            CostPace(cost)), {}, at_once=True)
    entries = [decode(line) for line in lines]
    steps = [index for index, entry in enumerate(entries) if isinstance(entry, StepRecord)]
    entries[steps[0]] = entries[steps[0]]._replace(inputs=Inputs(arrivals=(ReceivedBlocks(0, 1, True),)))
    with pytest.raises(ValueError, match="computed by other engines"):
        what_if(entries, {"scheduling_policy": "shortest"}, LatencyLimits())
