"""A thousand random changes of scheduling under load: nobody is lost, and each is obeyed by the next plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from support.records import admitted_of
from support.toy import EOS, alone, next_token, request

from slotwise.core.disciplines.batching_settings import KINDS, PREFILLS, Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.policy_settings import POLICIES, Ordering
from slotwise.core.record import NO_STEP, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import EVICTION_POLICIES, SLO, SchedulerLimits, Tier
from slotwise.core.step_time import StepTimeModel
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Configure
from slotwise.engine.scheduling import Scheduling

MS = 1_000_000
LIMITS = SchedulerLimits(
    max_model_len=64, num_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64,
    enable_prefix_caching=True, watermark_blocks=1, max_passes=4)
NAMES = ("gold", "silver", "bronze")
SWITCHES = 1000


def change(whims: random.Random) -> dict[str, Any]:
    """Any part of it, or several."""
    slots = whims.randint(1, 8)
    spare = slots
    tiers = []
    for name in whims.sample(NAMES, whims.randint(0, 3)):
        kept = whims.randint(0, spare // 2)
        spare -= kept
        tiers.append(Tier(name, slots=kept, weight=whims.choice((1, 4)), tpot=whims.choice((None, 0.004))))
    parts: dict[str, dict[str, Any]] = {
        "policy": {"scheduling_policy": whims.choice(POLICIES)},
        "discipline": {"batching": whims.choice(KINDS)},
        "prefill": {"batching": "continuous", "prefill": whims.choice(PREFILLS)},
        "limits": {"max_num_seqs": slots, "max_num_batched_tokens": slots + whims.randint(0, 40), "tiers": tiers},
        "tiers": {"tiers": tiers}, "time": {"max_step_ms": whims.choice((None, 3.0, 6.0))},
        "stall": {"max_stall_ms": whims.choice((None, 2.0, 5.0))},
        "eviction": {"eviction_policy": whims.choice(EVICTION_POLICIES)}}
    chosen: dict[str, Any] = {}
    for part in whims.sample(sorted(parts), whims.randint(1, 3)):
        chosen |= parts[part]
    return chosen


class Busy:
    """An engine that always has a few more requests than slots, its own clock, and all it ever told."""

    def __init__(self, seed: int, depth: int) -> None:
        self.whims = random.Random(seed)
        self._now = 1000 * MS
        self.scheduling = Scheduling(Batching(), Ordering(), max_num_seqs=LIMITS.max_num_seqs,
                                     max_num_batched_tokens=LIMITS.max_num_batched_tokens)
        times = StepTimeModel()
        self.scheduler = Scheduler(LIMITS, self.scheduling.discipline(), self.scheduling.policy(times), times)
        self.engine = Engine(
            self.scheduler, FakeExecutor(4, next_token), self.clock, (EOS,), depth=depth, scheduling=self.scheduling)
        self.asked: dict[str, list[int]] = {}  # what each must be given
        self.tiers: dict[str, str] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.serials = count()

    def clock(self) -> int:
        self._now += self.whims.randint(1, 2 * MS)
        return self._now

    def ask(self) -> None:
        whims, name = self.whims, f"r{next(self.serials)}"
        prompt = [3] * whims.choice((0, 8)) + [whims.randrange(1, 23) for _ in range(whims.randint(1, 20))]
        length = whims.randint(1, 12)
        slo = SLO(whims.choice("ab"), whims.choice(("", *NAMES)), whims.randint(-3, 3),
                  whims.choice((None, 0.02)), whims.choice((None, None, 0.005)))
        self.asked[name] = alone(request(name, prompt, length), LIMITS)
        self.tiers[name] = slo.tier
        self.engine.handle(Add(name, RequestSpec(prompt, SamplingSpec(max_tokens=length), slo=slo)))

    def slots(self) -> set[str]:
        """Who has one."""
        return {request.request_id for request in self.scheduler.requests() if request.slot >= 0}

    def step(self) -> StepRecord | None:
        record = self.engine.step() if self.engine.has_work else self.engine.idle_record()
        if record is None:
            return None
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=False):
            self.outputs.setdefault(name, []).extend(tokens)
        for end in record.ended:
            assert end.request_id not in self.ended, f"{end.request_id} ended twice"
            self.ended[end.request_id] = end.reason
        self.scheduler.check()
        return record

    def rest(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("it never comes to rest")


def obeys(record: StepRecord, scheduling: Scheduling, before: set[str]) -> None:
    """Raises AssertionError where the plan of `record` does what `scheduling` forbids.

    Args:
        before: who had a slot when that was changed: they go on, and newcomers wait for room.
    """
    kind, rows = scheduling.batching.kind, [row for row in range(len(record.plan.counts))
                                            if row not in record.plan.held]
    if admitted_of(record):
        assert len(record.plan.request_ids) <= scheduling.max_num_seqs
    whole = kind != "continuous" or scheduling.batching.prefill in ("inline", "alone")
    counts = [record.plan.counts[row] for row in rows]
    if not whole:
        assert sum(counts) <= max(scheduling.max_num_batched_tokens, 0)
    if kind == "one_at_a_time" and admitted_of(record):
        assert len(record.plan.request_ids) == 1
    if kind in ("static", "dynamic") and admitted_of(record):
        assert not before & set(record.plan.request_ids)
    if scheduling.batching.prefill == "alone" and admitted_of(record):
        assert set(admitted_of(record)) == set(record.plan.request_ids)


def keeps_slots(scheduling: Scheduling, used: Counter[str], admitted: Collection[str]) -> None:
    """Raises AssertionError where one of the tiers in `admitted` has a slot that is kept for another.

    Args:
        used: slots of each tier, after the plan.
    """
    free = scheduling.max_num_seqs - used.total()
    unused = {tier.name: max(0, tier.slots - used[tier.name]) for tier in scheduling.tiers}
    for name in admitted:
        assert sum(unused.values()) - unused.get(name, 0) <= free


@pytest.mark.parametrize("depth", [0, 1])
def test_a_thousand_switches_lose_nobody(depth: int) -> None:
    busy = Busy(depth, depth)
    refused = 0
    for _ in range(SWITCHES // 2):
        while busy.scheduler.num_unfinished < 12:
            busy.ask()
        try:
            scheduling = busy.scheduling.changed(change(busy.whims), LIMITS)
        except ValueError:
            refused += 1  # more tiers' slots than there are any more, or a batch larger than that
            continue
        busy.scheduling = scheduling
        running = busy.slots()
        busy.engine.handle(Configure(scheduling))
        for turn in range(busy.whims.randint(1, 6)):
            before = busy.slots()
            record = busy.step()
            if record is not None and record.step != NO_STEP and turn == depth:
                obeys(record, scheduling, running)
                if not depth and admitted_of(record):
                    slots = (before - {one.request_id for one in record.preempted}) | set(admitted_of(record))
                    used = Counter(busy.tiers[name] for name in slots)
                    keeps_slots(scheduling, used, {busy.tiers[name] for name in admitted_of(record)})
            if record is not None and record.inputs.configured is not None:
                assert record.inputs.configured == scheduling
    assert refused < SWITCHES // 10
    busy.rest()
    assert busy.ended.keys() == busy.asked.keys() and len(busy.asked) > 100
    assert set(busy.ended.values()) <= {"stop", "length"}
    assert busy.outputs == {name: tokens for name, tokens in busy.asked.items() if tokens}


@pytest.mark.parametrize("policy", ["priority", "shortest"])
def test_the_first_plan_after_a_change_follows_the_new_policy(policy: str) -> None:
    """Six wait in the order of arrival; the last of them is the first by the other policy."""
    busy = Busy(0, 0)
    busy.scheduling = replace(busy.scheduling, max_num_seqs=1)
    busy.engine.handle(Configure(busy.scheduling))
    for number in range(7):
        params = SamplingSpec(max_tokens=9 - number, ignore_eos=True)
        busy.engine.handle(Add(f"q{number}", RequestSpec([2], params, slo=SLO(priority=-number))))
    assert admitted_of(busy.step()) == ("q0",)
    other = busy.scheduling.changed({"scheduling_policy": policy, **({"preemption_gap": 99} if policy == "priority" else
                                                                     {})}, LIMITS)
    busy.engine.handle(Configure(other))
    while not (record := busy.step()).admitted:
        pass
    assert admitted_of(record) == ("q6",)


def test_what_a_batch_kept_back_is_told_to_those_who_have_no_turn_when_it_is_broken_up() -> None:
    """The next step has one token for three rows: the tokens of the other two are still theirs."""
    busy = Busy(0, 0)
    busy.scheduling = busy.scheduling.changed({"batching": "static"}, LIMITS)
    busy.engine.handle(Configure(busy.scheduling))
    for name, length in (("a", 3), ("b", 9), ("c", 12)):
        busy.asked[name] = alone(request(name, [5, 2], length, ignore_eos=True), LIMITS)
        busy.engine.handle(Add(name, RequestSpec([5, 2], SamplingSpec(max_tokens=length, ignore_eos=True))))
    for _ in range(6):
        busy.step()
    assert not any(busy.outputs.values())
    narrow = busy.scheduling.changed(
        {"batching": "continuous", "max_num_seqs": 1, "max_num_batched_tokens": 1}, LIMITS)
    busy.engine.handle(Configure(narrow))
    busy.rest()
    assert busy.outputs == busy.asked
