"""A row of nobody's, computed while nobody asks for anything, to know what a row alone takes just now.

Whoever was slowed down by neighbours wants to know what being alone would have taken.  A busy engine never finds out,
and what it found out at its start was true of that minute: a machine that others share is a third faster or slower in
the next.  So an engine at leisure computes a few steps now and then, until it knows enough:

    served ──► pause ──► burst ──► rest ──► burst ──► rest ... ENOUGH bursts ──► sleep
                         ▲ ▲ ▲ between two steps, whoever arrives is served at once

The row has a slot and a block that the scheduler knows nothing of, and a scheduler of its own, so that a step takes
what planning it takes, too, and nothing of anybody's is touched: what is cached stays.
"""

from __future__ import annotations

import logging
import statistics

from slotwise.batching.continuous import Chunked
from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.core.plan import Grant, Join, StepPlan, StepResult
from slotwise.core.scheduler import Scheduler
from slotwise.engine.executor import Executor
from slotwise.engine.loop import Engine
from slotwise.engine.messages import Add, Rehearsed
from slotwise.policies.fcfs import FirstComeFirstServed

WARM = 0.1  # seconds of a burst that nothing is learned from: cores are slow to wake, a third slower for so long
TRIED = 7  # steps behind them: the middle one is told
ENOUGH = 8  # bursts since anybody was served
PAUSE = 0.25  # seconds without work before a burst
REST = 10  # times what a burst took, before the next one
LONGEST = 0.05  # seconds of a step: whoever arrives in the middle of one waits for it
ANY_TOKEN = 0
NS = 1e-9

logger = logging.getLogger(__name__)


class Behind:
    """An executor's one slot and one block behind those that `limits` speak of, as an executor."""

    def __init__(self, executor: Executor, limits: SchedulerLimits) -> None:
        self._executor = executor
        self._slot = limits.max_num_seqs
        self._block = limits.num_blocks

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan._replace(
            slots=(self._slot,) * len(plan.slots), leaves=(self._slot,) * len(plan.leaves),
            joins=tuple([Join(join.request_id, self._slot, *join[2:]) for join in plan.joins]),
            grants=tuple([Grant(self._slot, (self._block,)) for _ in plan.grants])))

    def collect(self) -> StepResult:
        return self._executor.collect()


class Leisure:
    """When to rehearse, and what came of it.

    Where an engine plans the next step while one is computed nothing is rehearsed: steps that wait for each other would
    take longer than those that serve.
    """

    def __init__(self, engine: Engine) -> None:
        """Of this engine, which has a slot and a block more than its scheduler knows of."""
        self._clock = engine.clock
        self._row = _row_alone(engine)
        self._rehearses = engine.depth == 0 and self._row.limits.max_model_len > 1
        self._bursts = 0
        self._warm_ns = 0  # of the burst under way, so far
        self._tried: list[tuple[int, int]] = []  # nanoseconds and context of each step behind that
        self._due = self._after(PAUSE)

    def served(self) -> None:
        """The engine had something to do; a burst under way is forgotten."""
        self._bursts = 0
        self._end_burst(PAUSE)

    def wait(self) -> float | None:
        """Seconds until `spend` has something to do; None: as long as nobody is served."""
        if not self._rehearses or self._bursts == ENOUGH:
            return None
        return max(0.0, (self._due - self._clock()) * NS)

    def spend(self) -> Rehearsed | None:
        """Compute a step if one is due: what its burst has told, if it was the last of one."""
        if self.wait() != 0.0:
            return None
        step = self._step()
        if step is None:
            self._bursts = ENOUGH
        elif self._warm_ns * NS < WARM:
            self._warm_ns += step[0]
        else:
            self._tried.append(step)
        return self._told() if len(self._tried) == TRIED else None

    def _told(self) -> Rehearsed:
        """The end of a burst."""
        took, context = statistics.median_low(self._tried)
        self._end_burst(max(PAUSE, REST * NS * (self._warm_ns + sum(took for took, _ in self._tried))))
        self._bursts += 1
        self._rehearses = took * NS <= LONGEST
        return Rehearsed(self._clock(), took, context)

    def _end_burst(self, rest: float) -> None:
        self._warm_ns = 0
        self._tried.clear()
        self._due = self._after(rest)

    def _step(self) -> tuple[int, int] | None:
        """None: it failed; whoever is served next will meet what is wrong, and be told."""
        if not self._row.has_work:
            params = SamplingParams(temperature=0.0, max_tokens=self._row.limits.max_model_len, ignore_eos=True)
            self._row.handle(Add("rehearsal", [ANY_TOKEN], params, seed=0))
        try:
            record = self._row.step()
        except Exception:
            logger.exception("a rehearsal failed")
            return None
        if not record.counts:
            logger.error("a rehearsal failed: %s", record.failure)
            return None
        return record.ended_ns - record.started_ns, record.starts[0] + 1

    def _after(self, seconds: float) -> int:
        return self._clock() + round(seconds / NS)


def _row_alone(engine: Engine) -> Engine:
    """An engine of one slot and one block, beside `engine` on its executor."""
    size = engine.limits.block_size
    limits = SchedulerLimits(
        max_model_len=min(size, engine.limits.max_model_len), num_blocks=1, block_size=size, max_num_seqs=1,
        max_num_batched_tokens=1, enable_prefix_caching=False)
    scheduler = Scheduler(limits, Chunked(), FirstComeFirstServed())
    return Engine(scheduler, Behind(engine.executor, engine.limits), engine.clock)
