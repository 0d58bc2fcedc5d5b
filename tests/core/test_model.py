"""Thirty thousand random operations against the core: what comes, goes, expires, yields and is found again.

The model beside it is simple: a request's tokens are those it would have alone (`toy.alone`), and it ends once.  The
fake executor's cache holds the tokens themselves, and so does its host memory, so a block given to the wrong request or
a wrong copy shows as a wrong token; the driver checks conservation, `free + referenced + cached == total` on the device
and `free + kept == total` on the host, after every plan and every commit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import pytest
from support.toy import VOCAB, Driver, Guesses, alone, in_seed, next_token, request

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import POOLING_TYPES, PoolingSpec
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.record import StepPlan
from slotwise.core.scheduler_limits import ERROR, RECOMPUTE, SLO, SchedulerLimits, Tier

SEEDS, OPERATIONS = (7235, 327836540, *range(58)), 500  # first rows held when the budget or the discipline changed
HOST_BLOCKS = (3, 40, 0)
WINDOWS = ((0,), (0,), (0, 6), (7,), (0, 3, 11), (5, 0))  # of cache groups
DISCIPLINES = (
    Batching(), Batching(), Batching(prefill="inline"), Batching(prefill="alone"), Batching("orca"),
    Batching("static"), Batching("dynamic", max_wait_ms=2000), Batching("one_at_a_time"))
POLICIES = (
    Ordering(), Ordering("priority", ageing=5.0), Ordering("shortest"), Ordering("fair"), Ordering("program"),
    Ordering("deadline", ageing=30.0, default_ttft_ms=20_000.0),
    Ordering("deadline", default_ttft_ms=30_000.0, shed_late=True))
TIERS = (Tier("gold", slots=1, weight=2.0), Tier("bulk"))
BEGINNINGS = ([], [3] * 12, [3] * 6 + [7] * 6, list(range(16)))
SEEN: Counter[str] = Counter()


def drawn_limits(draw: Random, num_host_blocks: int) -> SchedulerLimits:
    slots, block_size = draw.randint(2, 6), draw.randint(1, 5)
    windows = draw.choice(WINDOWS)
    return SchedulerLimits(
        max_model_len=draw.randint(20, 48), num_blocks=len(windows) * draw.randint(30, 70) // block_size,
        block_size=block_size,
        max_num_seqs=slots, max_num_batched_tokens=slots + draw.randint(0, 20), enable_prefix_caching=True,
        watermark_blocks=draw.randint(0, 2), max_passes=draw.randint(0, 4),
        on_pressure=draw.choice((RECOMPUTE, RECOMPUTE, RECOMPUTE, ERROR)), num_host_blocks=num_host_blocks,
        windows=windows, max_chunk=draw.randint(1, 20))


class Life(Driver):
    """Carries out operations and knows what everyone's output should be."""

    def __init__(self, draw: Random, limits: SchedulerLimits) -> None:
        proposer = Guesses(draw.randrange(2**32)) if draw.random() < 0.5 else None
        super().__init__(limits, draw.choice(DISCIPLINES).discipline(limits.max_num_seqs), proposer=proposer)
        self.draw = draw
        self.expected: dict[str, list[int]] = {}
        self.vectors: dict[str, int] = {}  # those of pooled requests

    def operate(self) -> None:
        operation = self.draw.choices(
            (self.arrive, self.step, self.abort, self.jump, self.switch, self.order), (16, 74, 5, 3, 1, 1))[0]
        SEEN[operation.__name__] += 1
        operation()

    def arrive(self) -> None:
        draw, name = self.draw, f"r{len(self.expected)}"
        prompt = draw.choice(BEGINNINGS) + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
        slo = SLO(
            draw.choice("abc"), draw.choice(("", "gold", "bulk")), draw.randint(-2, 2), draw.choice((None, 3.0, 60.0)),
            draw.choice((None, None, None, 1.0)))
        pooling = PoolingSpec(draw.choice(POOLING_TYPES)) if draw.random() < 0.2 else None
        new = request(name, prompt, draw.randint(1, 20), draw.choice(("", "", "other")), slo, pooling)
        new.spec = replace(new.spec, session=draw.choice(("", "x", "y")))
        if pooling is not None:
            self.vectors[name] = next_token(prompt)
        new.deadline = self.now + draw.choice((inf, inf, inf, inf, 20.0, 0.0))
        self.expected[name] = alone(new, self.limits)
        self.add(new)

    def step(self) -> None:
        if len(self.flying) < 2 and (not self.flying or self.draw.random() < 0.5):
            self.plan()
        else:
            self.commit()

    def abort(self) -> None:
        """Anyone, in any state; often one who has ended, which must change nothing."""
        self.finish(f"r{self.draw.randrange(len(self.expected) + 1)}")

    def jump(self) -> None:
        self.now += self.draw.choice((0.0, 0.5, 10.0))

    def switch(self) -> None:
        slots = self.draw.randint(2, self.scheduler.num_slots)
        self.configure(self.draw.choice(DISCIPLINES).discipline(slots), slots, self.draw.randint(0, 20))

    def order(self) -> None:
        """Another policy, other tiers, other limits of a step."""
        draw, limits = self.draw, self.limits
        self.limits = replace(
            limits, tiers=draw.choice(((), TIERS)), max_step_ms=draw.choice((None, 900.0, 4000.0)),
            max_stall_ms=draw.choice((None, 700.0)))
        policy = draw.choice(POLICIES).policy(self.limits.tiers, self.scheduler.times)
        self.configure(
            self.discipline, limits.max_num_seqs, limits.max_num_batched_tokens - limits.max_num_seqs, policy)

    def plan(self) -> StepPlan:
        plan = super().plan()
        SEEN["hit"] += sum(bool(admission.num_cached) for admission in plan.admitted)
        return plan


@pytest.mark.slow
def test_nothing_is_lost_and_nobody_gets_what_is_not_theirs():
    SEEN.clear()
    for seed in SEEDS:
        with in_seed(seed):
            live(Random(seed), HOST_BLOCKS[seed % 3])
    total = sum(SEEN[name] for name in ("arrive", "step", "abort", "jump", "switch", "order"))
    assert total >= 30_000
    for kind in ("hit", "save", "load", "preempted", "length", "stop", "abort", "timeout", "shed", "error", "rejected",
                 "pooled", "expired"):
        assert SEEN[kind] >= 5, f"{kind} hardly ever happened: {SEEN}"


def live(draw: Random, num_host_blocks: int) -> None:
    life = Life(draw, drawn_limits(draw, num_host_blocks))
    for _ in range(OPERATIONS):
        life.operate()
    life.run()
    SEEN.update(life.ended.values())
    SEEN["pooled"] += len(life.pooled)
    SEEN["preempted"] += len(life.preempted)
    SEEN["save"] += sum(len(plan.saves) for plan in life.plans)
    SEEN["load"] += sum(len(plan.loads) for plan in life.plans)
    SEEN["expired"] += sum(len(plan.expired_blocks) for plan in life.plans)
    assert life.ended.keys() == life.expected.keys(), "everyone ends, once"
    for name, reason in life.ended.items():
        got, expected = life.output.get(name, []), life.expected[name]
        if reason in ("length", "stop"):
            assert got == expected, name
            assert life.pooled.get(name) == life.vectors.get(name), name
        else:
            assert got == expected[: len(got)], name
        if reason in ("rejected", "timeout", "shed"):
            assert got == [], name
    assert life.scheduler.num_free_blocks == life.limits.num_blocks
