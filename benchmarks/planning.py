"""Times the scheduler in steady decode: `plan`, `commit` and the events of both.

    python -m benchmarks.planning [--policy NAME ...] [--eviction-policy NAME] [--kv-disk] [--steps N]

Prefix caching, reasons and events are on, blocks fill up in every step, the garbage collector is set as in a server.
No model runs: it times the scheduler alone, on one core.  With `--kv-disk` it also times what the engine's thread does
for blocks on disk; the writer, which runs beside a step's kernels in a server, catches up between two steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.commands import bar, parser_of
from rich.console import Console
from rich.table import Table

from slotwise.compose.launch import hold_off, settle
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.policy_settings import POLICIES, Ordering
from slotwise.core.record import StepPlan, StepResult
from slotwise.core.request import Request, RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import EVICTION_POLICIES, LRU, SLO, SchedulerLimits
from slotwise.core.step_time import StepTimeModel
from slotwise.engine.kv_disk import DiskLink, DiskStore
from slotwise.engine.kv_link import KVLink

CROWDS = ((64, 0, 128.0), (256, 0, 512.0), (1024, 10_000, 2048.0))  # running, waiting; at most 2 microseconds a row
SHORTEST, OUTPUT, BLOCK = 64, 4000, 64  # tokens of the shortest prompt, of an output, of a block
LONGEST = SHORTEST + BLOCK - 1 + OUTPUT
TENANTS = 16


def crowd(policy: str, running: int, waiting: int, eviction: str = LRU) -> Scheduler:
    """Returns a scheduler whose `running` requests are past their prompts."""
    blocks = running * (LONGEST // BLOCK + 1)
    limits = SchedulerLimits(
        max_model_len=LONGEST, num_blocks=blocks, block_size=BLOCK, max_num_seqs=running,
        max_num_batched_tokens=max(running, 8192), enable_prefix_caching=True, max_passes=16,
        eviction_policy=eviction)
    times = StepTimeModel()
    scheduler = Scheduler(limits, Batching().discipline(running), Ordering(policy).policy((), times), times)
    asked = SamplingSpec(max_tokens=OUTPUT, ignore_eos=True)
    for number in range(running + waiting):
        prompt = [number % 251, *range(SHORTEST - 1 + number % BLOCK)]  # so that blocks fill up in every step
        slo = SLO(f"tenant {number % TENANTS}", priority=number % 5)
        scheduler.add(Request(number, RequestSpec(prompt, asked, number, slo=slo)), number * 1e-3)
    now = 100.0
    while True:
        plan = scheduler.schedule(now)
        scheduler.commit(plan, result(plan), now + 0.01)
        now += 0.02
        if plan.num_rows == running and max(plan.counts) == 1:
            return scheduler


def result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, tuple([(7,) if wanted else () for wanted in plan.num_logits]))


class NoBytes:
    """Blocks of a cache without contents."""

    block_bytes, layout = BLOCK, ""

    def read(self, block: int, into: memoryview) -> None:
        """Leaves the buffer as it is."""

    def write(self, block: int, data: memoryview) -> None:
        """Drops the data."""


@contextmanager
def linked(scheduler: Scheduler) -> Iterator[KVLink]:
    """Yields a link to blocks on disk in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        store = DiskStore(Path(name), NoBytes.block_bytes, 1 << 30, 3600.0)
        link = DiskLink(store, NoBytes(), scheduler, "planning")
        try:
            yield link
        finally:
            link.close()


def microseconds(policy: str, running: int, waiting: int, steps: int, eviction: str = LRU, *, on_disk: bool = False,
                 ) -> float:
    """Returns the median time of `plan` and `commit`, and of what the engine's thread does for blocks on disk."""
    hold_off()
    scheduler = crowd(policy, running, waiting, eviction)
    with linked(scheduler) if on_disk else nullcontext() as link:
        settle()  # as a server does
        return _median(scheduler, link, steps)


def _median(scheduler: Scheduler, link: KVLink | None, steps: int) -> float:
    took = []
    for step in range(steps):
        now = 1000 + step * 0.02
        began = time.perf_counter()
        if link is not None and link.has_news:
            link.pop_news()
        plan = scheduler.schedule(now)
        if link is not None:
            link.follow(scheduler.transfers, scheduler.transfers.pop_unwanted())
            link.begin(scheduler.transfers)
        planned = time.perf_counter()
        outcome = result(plan)
        computed = time.perf_counter()
        scheduler.commit(plan, outcome, now + 0.01)
        took.append((planned - began) + (time.perf_counter() - computed))
        while isinstance(link, DiskLink) and link.num_unwritten:
            time.sleep(0.001)
    return statistics.median(took) * 1e6


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--policy", nargs="*", choices=POLICIES, default=["fcfs"], help="policies to time")
    parser.add_argument("--eviction-policy", choices=EVICTION_POLICIES, default=LRU, help="order of eviction")
    parser.add_argument("--steps", type=int, default=400, help="steps to take the median of")
    parser.add_argument("--kv-disk", action="store_true", help="blocks are also written to disk")
    asked = parser.parse_args()
    table = Table(title="plan + commit, microseconds a step", caption="aimed at: as many as the last row says")
    for name in ("policy", *(f"{running:,} run, {waiting:,} wait" for running, waiting, _ in CROWDS)):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy in bar(asked.policy, "policies"):
        table.add_row(policy, *(
            f"{microseconds(policy, running, waiting, asked.steps, asked.eviction_policy, on_disk=asked.kv_disk):,.0f}"
            for running, waiting, _ in bar(CROWDS, policy)))
    table.add_row("at most", *(f"{most:,.0f}" for _, _, most in CROWDS))
    Console().print(table)


if __name__ == "__main__":
    main()
