"""Times the scheduler in steady decode: `plan`, `commit` and the events of both.

    python -m benchmarks.planning [--policy NAME ...] [--eviction-policy NAME ...] [--kv-disk] [--reverse] [--steps N]

Prefix caching, reasons and events are on, blocks fill up in every step, the garbage collector is set as in a server.
No model runs: it times the scheduler alone, on one core.  With `--kv-disk` it also times what the engine's thread does
for blocks on disk; the writer, which runs beside a step's kernels in a server, catches up between two steps.

The first row has first come, first served and `lru`, and blocks in memory only.  The rows take a step each, in random
order, after a pause as long as a short step.  The time is the thread's own, so what else the machine does changes all
rows alike.  Where their objects lie in memory may not: `--reverse` makes the last row's first.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product, starmap
from pathlib import Path
from random import Random
from typing import NamedTuple

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
FCFS = "fcfs"
PAUSE = 0.001  # seconds before each step


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


class Arm(NamedTuple):
    """A row of the table: what differs from the others."""

    policy: str = FCFS
    eviction: str = LRU
    on_disk: bool = False


class Timed:
    """A scheduler, and the microseconds of its steps."""

    def __init__(self, scheduler: Scheduler, link: KVLink | None) -> None:
        self._scheduler, self._link = scheduler, link
        self.took: list[float] = []

    def step(self, now: float) -> None:
        scheduler, link = self._scheduler, self._link
        began = time.thread_time()
        if link is not None and link.has_news:
            link.pop_news()
        plan = scheduler.schedule(now)
        if link is not None:
            link.follow(scheduler.transfers, scheduler.transfers.pop_unwanted())
            link.begin(scheduler.transfers)
        planned = time.thread_time()
        outcome = result(plan)
        computed = time.thread_time()
        scheduler.commit(plan, outcome, now + 0.01)
        if link is not None:
            link.follow(scheduler.transfers, scheduler.transfers.pop_unwanted())
        self.took.append(1e6 * ((planned - began) + (time.thread_time() - computed)))
        while isinstance(link, DiskLink) and link.num_unwritten:
            time.sleep(PAUSE)


def microseconds(arms: Sequence[Arm], running: int, waiting: int, steps: int) -> list[float]:
    """Returns, by arm, the median time of `plan` and `commit`, and of what the engine's thread does for the disk."""
    hold_off()
    draw = Random(0)  # what ran before a step leaves the processor's caches in a state: each row follows each
    with ExitStack() as stack:
        timed = []
        for arm in arms:
            scheduler = crowd(arm.policy, running, waiting, arm.eviction)
            timed.append(Timed(scheduler, stack.enter_context(linked(scheduler)) if arm.on_disk else None))
        settle()  # as a server does
        for step in range(steps):
            for one in draw.sample(timed, len(timed)):
                time.sleep(PAUSE)
                one.step(1000 + step * 0.02)
    return [statistics.median(one.took) for one in timed]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--policy", nargs="*", choices=POLICIES, default=[FCFS], help="policies to time")
    parser.add_argument("--eviction-policy", nargs="*", choices=EVICTION_POLICIES, default=[LRU],
                        help="orders of eviction to time")
    parser.add_argument("--steps", type=int, default=400, help="steps to take the median of")
    parser.add_argument("--kv-disk", action="store_true", help="blocks are also written to disk")
    parser.add_argument("--reverse", action="store_true", help="make what the rows time in reverse order")
    asked = parser.parse_args()
    arms = list(dict.fromkeys([Arm(), *starmap(Arm, product(
        asked.policy, asked.eviction_policy, (False, True) if asked.kv_disk else (False,)))]))
    table = Table(title="plan + commit, microseconds a step", caption="aimed at: as many as the last row says")
    for name in ("policy", "order of eviction", "blocks on disk"):
        table.add_column(name)
    for running, waiting, _ in CROWDS:
        table.add_column(f"{running:,} run, {waiting:,} wait", justify="right")
    way = -1 if asked.reverse else 1
    crowds = [microseconds(arms[::way], running, waiting, asked.steps)[::way]
              for running, waiting, _ in bar(CROWDS, "crowds")]
    for arm, took in zip(arms, zip(*crowds, strict=True), strict=True):
        table.add_row(arm.policy, arm.eviction, "yes" if arm.on_disk else "no", *(
            f"{one:,.0f} ({one / crowd[0] - 1:+.1%})" for one, crowd in zip(took, crowds, strict=True)))
    table.add_row("at most", "", "", *(f"{most:,.0f}" for _, _, most in CROWDS))
    Console().print(table)


if __name__ == "__main__":
    main()
