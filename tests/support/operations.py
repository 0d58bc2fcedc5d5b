"""Random operations on a scheduler, for tests of its properties."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import strategies as st

from slotwise.core.disciplines.disciplines import Chunked, Dynamic, Inline, OneAtATime, Orca, PromptsAlone, Static
from slotwise.core.interfaces import Discipline, Proposer
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.scheduler_limits import ERROR, EVICTION_POLICIES, RECOMPUTE, SLO, SchedulerLimits, Tier
from slotwise.core.step_time import StepTimeModel
from support.toy import VOCAB, Driver, alone, request

LIMITS = st.builds(
    lambda slots, extra, **others: SchedulerLimits(
        max_num_seqs=slots, max_num_batched_tokens=slots + extra, **others),
    st.integers(1, 6), st.integers(0, 20), num_blocks=st.integers(1, 12), block_size=st.integers(1, 5),
    max_model_len=st.integers(2, 40), enable_prefix_caching=st.booleans(), stages=st.sampled_from((1, 1, 2, 3)),
    watermark_blocks=st.integers(0, 2), max_passes=st.integers(0, 3),
    on_pressure=st.sampled_from((RECOMPUTE, RECOMPUTE, ERROR)), eviction_policy=st.sampled_from(EVICTION_POLICIES),
    tenant_cache_share=st.sampled_from((0.0, 0.5, 1.0)))
DISCIPLINE = st.one_of(
    st.builds(Chunked, st.integers(0, 7)),
    st.builds(Inline), st.builds(PromptsAlone), st.builds(Orca), st.builds(OneAtATime),
    st.builds(Static, st.integers(1, 6)),
    st.builds(Dynamic, st.integers(1, 6), st.floats(0, 5)))
BEGINNINGS = ([], [3] * 12, [3] * 6 + [7] * 6, list(range(16)))
PROMPT = st.builds(
    lambda beginning, rest: [*beginning, *rest], st.sampled_from(BEGINNINGS),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
TENANT = st.sampled_from(("", "", "other"))
PATIENCE = st.sampled_from((inf, inf, 3.0, 0.0))  # seconds in the queue
TERMS = st.builds(
    SLO, TENANT, st.sampled_from(("", "gold", "bulk")), st.integers(-2, 2), st.sampled_from((None, 2.0, 20.0)),
    st.sampled_from((None, None, 1.0)))
POLICY = st.sampled_from((
    Ordering(), Ordering("priority", ageing=5.0), Ordering("shortest"), Ordering("fair"), Ordering("program"),
    Ordering("deadline", ageing=9.0, default_ttft_ms=5000.0),
    Ordering("deadline", default_ttft_ms=9000.0, shed_late=True)))
STEPS = st.builds(
    lambda step_ms, stall_ms, kept: {
        "max_step_ms": step_ms, "max_stall_ms": stall_ms,
        "tiers": (Tier("gold", slots=1), Tier("bulk", weight=2.0)) if kept else ()},
    st.sampled_from((None, 800.0, 5000.0)), st.sampled_from((None, 500.0)), st.booleans())
OPERATION = st.one_of(
    st.tuples(st.just("add"), PROMPT, st.integers(1, 20), st.integers(0, 3), TERMS, PATIENCE),
    st.tuples(st.just("jump"), st.floats(0, 5)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("commit")),
    st.tuples(st.just("switch"), DISCIPLINE, st.integers(2, 6), st.integers(0, 20)),
    st.tuples(st.just("order"), POLICY, STEPS),
)


def play(
    limits: SchedulerLimits, discipline: Discipline, operations: list[tuple], proposer: Proposer | None = None,
) -> tuple[Driver, dict[str, list[int]]]:
    """Carry out `operations`, then run to the end: the driver, and the output each request should have had."""
    times = StepTimeModel()
    driver, expected = Driver(limits, discipline, times=times, proposer=proposer), {}
    for operation in operations:
        match operation:
            case ("jump", seconds):
                driver.now += seconds
            case ("add", prompt, max_tokens, min_tokens, slo, patience):
                name = f"r{len(expected)}"
                new = request(
                    name, prompt, max_tokens, slo.tenant, slo, min_tokens=min(min_tokens, max_tokens))
                new.spec = replace(new.spec, session=f"s{max_tokens % 3}", retain=float(max_tokens % 4))
                new.deadline = driver.now + patience
                expected[name] = alone(new, limits)
                driver.add(new)
            case ("abort", number):
                driver.finish(f"r{number}")
            case ("plan",) if len(driver.flying) <= driver.limits.max_in_flight:
                driver.plan()
            case ("commit",) if driver.flying:
                driver.commit()
            case ("switch", other, slots, extra):
                driver.configure(other, min(slots, limits.max_num_seqs), extra)
            case ("order", ordering, steps) if driver.limits.max_num_seqs > 1:
                driver.limits = replace(driver.limits, **steps)
                spare = driver.limits.max_num_batched_tokens - driver.limits.max_num_seqs
                driver.configure(driver.discipline, driver.limits.max_num_seqs, spare, ordering.policy(
                    driver.limits.tiers, times))
    driver.run()
    return driver, expected
