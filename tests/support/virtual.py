"""Engines without a model on a clock without seconds: a step takes as long as its rows and tokens say."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.record import StepPlan, StepResult
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.engine import Engine
from slotwise.engine.executor import Executor, FakeExecutor
from slotwise.measure.bench.offline_run import Clock, Stand
from slotwise.measure.workload.workloads import Workload, WorkRequest
from support.toy import VOCAB, next_token

STEP_NS, ROW_NS, TOKEN_NS = 10_000_000, 1_000_000, 100_000  # of a step, of each of its rows, of each prompt token
BLOCK_BYTES = 1000


class VirtualClock:
    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += max(1, round(seconds * 1e9))


class CountingExecutor:
    """Samples each token's position: a model cheap enough for very many steps."""

    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        tokens = tuple(
            ((start + count) % VOCAB,) if samples else ()
            for start, count, samples in zip(plan.starts, plan.counts, plan.num_logits, strict=True))
        self._results.append(StepResult(plan.step, tokens))

    def collect(self) -> StepResult:
        return self._results.popleft()


class TimedExecutor:
    """Lets the clock pass while another executor computes."""

    def __init__(self, inner: Executor, clock: VirtualClock) -> None:
        self._inner = inner
        self._clock = clock

    def submit(self, plan: StepPlan) -> None:
        if plan.slots:
            beyond = plan.num_tokens - plan.num_rows
            self._clock.ns += STEP_NS + ROW_NS * plan.num_rows + TOKEN_NS * beyond
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()


def stand(
    settings: Mapping[str, Any], *, counting: bool = False, num_blocks: int = 4096, prefix_caching: bool = False,
) -> Stand:
    """An engine as `settings` of EngineConfig ask, of sequences up to 4096 tokens in blocks of 16."""
    batching = Batching(
        settings.get("batching", "continuous"), settings.get("prefill"), settings.get("batch_size"),
        settings.get("max_wait_ms"))
    slots = settings.get("max_num_seqs", 4)
    blocks = settings["kv_cache_memory"] // BLOCK_BYTES if "kv_cache_memory" in settings else num_blocks
    limits = SchedulerLimits(
        max_model_len=4096, num_blocks=blocks, block_size=16, max_num_seqs=slots,
        max_num_batched_tokens=max(slots, settings.get("max_num_batched_tokens") or 512),
        enable_prefix_caching=prefix_caching)
    clock = VirtualClock()
    executor = CountingExecutor() if counting else FakeExecutor(limits.block_size, next_token)
    scheduler = Scheduler(limits, batching.discipline(slots), FirstComeFirstServed())
    engine = Engine(scheduler, TimedExecutor(executor, clock), clock.now_ns)
    return Stand(engine, limits, VOCAB, Clock(clock.now_ns, clock.sleep))


def queued(outputs: list[int], prompts: list[int] | None = None, max_tokens: int = 0) -> Workload:
    """Everyone at the start; prompts of one token unless told."""
    return arriving([0.0] * len(outputs), outputs, prompts, max_tokens)


def arriving(
    times: list[float], outputs: list[int], prompts: list[int] | None = None, max_tokens: int = 0,
) -> Workload:
    requests = tuple(
        WorkRequest(number, at, num_prompt, num_output)
        for number, (at, num_prompt, num_output) in enumerate(
            zip(times, prompts or [1] * len(outputs), outputs, strict=True)))
    return Workload(requests, max_tokens or max(outputs))
