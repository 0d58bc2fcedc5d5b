"""Crowds for tests of policies: who comes when, on what terms; played on a driver, a second a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from slotwise.core.interfaces import Policy
from slotwise.core.record import StepPlan
from slotwise.core.request import NO_SLO, Request, State
from slotwise.core.scheduler_limits import SLO, SchedulerLimits
from slotwise.core.step_time import StepTimeModel, Work
from support.toy import VOCAB, Driver, alone, request

ROOMY = SchedulerLimits(
    max_model_len=128, num_blocks=512, block_size=4, max_num_seqs=3, max_num_batched_tokens=1024)
TIGHT = replace(ROOMY, max_model_len=40, num_blocks=14, max_num_seqs=4, max_num_batched_tokens=8)
Look = Callable[[Driver, StepPlan], None]


@dataclass(frozen=True)
class Comer:
    """Comes `gap` seconds after the one before, with a prompt of `prompt` tokens."""

    gap: int
    prompt: int
    most: int  # tokens of output
    slo: SLO = NO_SLO
    session: str = ""


class KnownTimes(StepTimeModel):
    """Step times that need not be learned."""

    TOKEN = 0.25  # seconds
    is_trained = True

    def seconds(self, work: Work) -> float:
        return self.TOKEN * work.tokens

    def step(self, work: Work, started: float, ended: float) -> None:
        """Learns nothing."""


class Priced(KnownTimes):
    """Ten milliseconds a step, one a token, and attention."""

    def seconds(self, work: Work) -> float:
        if not work.rows:
            return 0.0
        return 0.010 + 0.001 * work.tokens + 1e-6 * work.context + 2e-6 * work.pairs


def slo(
    tenants: tuple[str, ...] = ("",), tiers: tuple[str, ...] = ("",), priorities: tuple[int, ...] = (0,),
    ttfts: tuple[float | None, ...] = (None,), tpots: tuple[float | None, ...] = (None,),
) -> st.SearchStrategy[SLO]:
    return st.builds(SLO, *(st.sampled_from(values) for values in (tenants, tiers, priorities, ttfts, tpots)))


def comers(
    on: st.SearchStrategy[SLO], max_prompt: int = 12, max_output: int = 24, max_size: int = 25,
    sessions: tuple[str, ...] = ("",),
) -> st.SearchStrategy[list[Comer]]:
    """Crowds, on the terms `on`, that come faster than they are served."""
    one = st.builds(
        Comer, st.sampled_from((0, 0, 0, 1, 2, 9)), st.integers(1, max_prompt), st.integers(1, max_output), on,
        st.sampled_from(sessions))
    return st.lists(one, min_size=1, max_size=max_size)


def crowd(comers: Iterable[Comer]) -> list[tuple[float, Request]]:
    """Requests r0, r1 ... and the second at which each comes."""
    now, found = 0.0, []
    for number, comer in enumerate(comers):
        now += comer.gap
        prompt = [(5 * number + place) % VOCAB for place in range(comer.prompt)]
        one = request(f"r{number}", prompt, comer.most, slo=comer.slo)
        one.spec = replace(one.spec, session=comer.session)
        found.append((now, one))
    return found


def nobody(driver: Driver, plan: StepPlan) -> None:
    """Looks at nothing."""


def play(driver: Driver, coming: list[tuple[float, Request]], look: Look = nobody, most_steps: int = 5000) -> None:
    """Plan and commit until everyone has come and ended; `look` is told each plan before it is committed."""
    left = list(coming)
    for _ in range(most_steps):
        while left and left[0][0] <= driver.now:
            driver.add(left.pop(0)[1])
        if not left and not driver.scheduler.has_work:
            return
        look(driver, driver.plan())
        driver.commit()
    raise AssertionError(f"no end after {most_steps} steps: {list(driver.scheduler.requests())}")


def waiting(driver: Driver) -> list[Request]:
    return [one for one in driver.scheduler.requests() if one.state is not State.RUNNING]


def running(driver: Driver) -> list[Request]:
    return [one for one in driver.scheduler.requests() if one.state is State.RUNNING]


class Starts(Driver):
    """Knows who started for the first time while whom was waiting for that."""

    def __init__(self, policy: Policy, limits=TIGHT) -> None:
        super().__init__(limits, policy=policy, times=KnownTimes())
        self.passed: list[tuple[Request, Request]] = []  # who went, before whom
        self.everyone: dict[str, Request] = {}
        self._unstarted: dict[str, Request] = {}

    def add(self, new: Request) -> None:
        self.everyone[new.request_id] = self._unstarted[new.request_id] = new
        super().add(new)

    def plan(self) -> StepPlan:
        plan = super().plan()
        for admission in plan.admitted:
            went = self.everyone[admission.request_id]
            self._unstarted.pop(went.request_id, None)
            self.passed += [(went, left) for left in self._unstarted.values() if left.arrival < went.arrival]
        return plan

    def _end(self, name: str, reason: str) -> None:
        super()._end(name, reason)
        self._unstarted.pop(name, None)



def assert_right(driver: Starts) -> None:
    """Everyone ended once, with the tokens that are right."""
    assert driver.ended.keys() == driver.everyone.keys()
    for name, reason in driver.ended.items():
        if reason in ("stop", "length"):
            assert driver.output[name] == alone(driver.everyone[name], driver.limits)
