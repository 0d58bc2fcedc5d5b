"""Orders of eviction: who goes first, that continuations go before their prefix, and what claims are worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.beginnings import Watching, limits
from support.toy import request

from slotwise.core.eviction import Retained
from slotwise.core.scheduler_limits import COST, EVICTION_POLICIES, HINTED, LRU, PREDICTED, SLO
from slotwise.core.step_time import StepTimeModel


def times() -> StepTimeModel:
    """A model that knows what steps take, and learns nothing."""
    found = StepTimeModel()
    found.learns = False
    found.typical = lambda work: work.tokens + 100.0 * work.pairs
    return found


def driver_of(policy: str, num_blocks: int = 8, share: float = 1.0, num_host_blocks: int = 0) -> Watching:
    return Watching(
        limits(num_blocks=num_blocks, max_model_len=33, eviction_policy=policy, tenant_cache_share=share,
               num_host_blocks=num_host_blocks), None, None, times())


def served(driver: Watching, name: str, token: int, num_blocks: int, **spec: object) -> int:
    """Serves a request of so many full blocks of `token`, and one token more.  Returns how many tokens it found."""
    new = request(name, [token] * (4 * num_blocks + 1), 1, ignore_eos=True)
    new.spec = replace(new.spec, **spec)
    driver.add(new)
    driver.run()
    return driver.cached[name][0]


def test_a_long_prompt_outlives_a_short_one_by_what_it_costs_and_not_for_ever():
    """Under `lru` the older, longer prompt loses a block; under `cost` the one that is cheaper to compute again."""
    for policy, found in ((LRU, 12), (COST, 16)):
        driver = driver_of(policy, num_blocks=9)
        served(driver, "long", 1, 4)
        served(driver, "short", 2, 1)
        served(driver, "other", 3, 4)
        assert served(driver, "again", 1, 4) == found, policy
    for number in range(40):
        served(driver, f"n{number}", 10 + number, 3)
    assert served(driver, "at last", 1, 4) == 0


def test_a_claimed_prefix_outlives_others_until_its_time_is_over():
    for wait, found in ((0.0, 12), (100.0, 0)):
        driver = driver_of(HINTED)
        served(driver, "kept", 1, 3, retain=50.0)
        driver.now += wait
        for number in range(4):
            served(driver, f"n{number}", 10 + number, 4)
        assert served(driver, "again", 1, 3) == found


@pytest.mark.parametrize(("policy", "found"), [(LRU, 0), (HINTED, 12), (PREDICTED, 12)])
def test_a_claim_holds_in_host_memory_too_until_its_time_is_over(policy, found):
    """Its blocks leave the device one by one; on the host they outlive what was used later."""
    driver = driver_of(policy, num_host_blocks=8)
    served(driver, "kept", 1, 3, retain=50.0)
    for number in range(4):
        served(driver, f"n{number}", 10 + number, 7)
    assert served(driver, "again", 1, 3, retain=50.0) == found
    driver.now += 100.0
    for number in range(4):
        served(driver, f"later{number}", 14 + number, 7)
    assert served(driver, "at last", 1, 3) == 0


@pytest.mark.parametrize("again", [{"session": "agent"}, {"retain": 15.0}])
def test_a_claim_in_host_memory_is_not_replaced_by_a_weaker_one(again):
    """The prompt comes back twice without its retention, and leaves the device with what is known of it then."""
    driver = driver_of(PREDICTED, num_host_blocks=8)
    served(driver, "kept", 1, 3, retain=1e6)
    for turn in range(3):
        for number in range(2):
            served(driver, f"n{turn}{number}", 10 + 2 * turn + number, 7)
        served(driver, f"again{turn}", 1, 3, **again)
        driver.now += 10.0
    driver.now += 1000.0
    for number in range(4):
        served(driver, f"later{number}", 20 + number, 7)
    assert served(driver, "at last", 1, 3) == 12


def test_what_a_tenant_claims_in_host_memory_is_its_share():
    driver = driver_of(HINTED, num_host_blocks=12, share=0.5)  # four blocks of the device and six of the host
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        served(driver, name, token, 3, retain=1e6, slo=SLO("flood"))
        served(driver, f"after {name}", 10 + token, 7)
    assert driver.scheduler.kv.host.order._num_covered == {"flood": 6}
    for token in range(4, 7):
        served(driver, f"later {token}", 10 + token, 7)
    assert [served(driver, f"{token} again", token, 3) for token in (2, 3, 1)] == [12, 12, 0]


def test_claims_make_no_request_wait():
    driver = driver_of(HINTED)
    served(driver, "kept", 1, 5, retain=1e6)
    served(driver, "whole", 2, 7)
    assert driver.cached["whole"] == [0] and driver.output["whole"] and not driver.preempted
    assert served(driver, "again", 1, 5) == 0


def test_a_tenant_claims_its_share_and_its_oldest_claims_go_first():
    driver = driver_of(HINTED, num_blocks=12, share=0.5)  # six blocks
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        served(driver, name, token, 3, retain=1e6, slo=SLO("flood"))
    served(driver, "light", 4, 2, retain=1e6, slo=SLO("light"))
    served(driver, "others", 5, 3)
    assert served(driver, "light again", 4, 2) == 8
    assert [served(driver, f"{token} again", token, 3) for token in (2, 3, 1)] == [12, 12, 0]


@pytest.mark.parametrize(("share", "covered", "kept"), [(0.25, 0, 8), (1.0, 0, 12), (1.0, 7, 4), (1.0, 3, 0)])
def test_what_is_retained_is_told(share, covered, kept):
    """At most the tenant's share, and at most the covered tokens, in whole blocks."""
    driver = driver_of(HINTED, share=share)
    new = request("a", [1] * 13, 1, ignore_eos=True)
    new.spec = replace(new.spec, retain=9.0, retain_tokens=covered)
    driver.add(new)
    driver.run()
    assert new.num_retained == kept
    for number in range(4):
        served(driver, f"n{number}", 10 + number, 4)
    assert served(driver, "again", 1, 3) == kept


@pytest.mark.parametrize("named", [True, False])
def test_a_session_that_comes_back_is_held_for_as_long_as_its_pauses(named):
    """Two pauses of 10 s are known: its blocks outlive others for 12 s, and no longer."""
    for wait, found in ((9.0, True), (60.0, False)):
        driver = driver_of(PREDICTED, num_blocks=10)
        for turn, length in enumerate((2, 3, 4)):
            served(driver, f"turn{turn}", 1, length, session="agent" * named)
            driver.now += 10.0 if turn < 2 else wait
        served(driver, "x", 2, 3)
        served(driver, "y", 3, 4)
        assert (served(driver, "back", 1, 4, session="agent" * named) == 16) == found


def test_of_sessions_that_pause_the_one_expected_last_goes_first():
    driver = driver_of(PREDICTED, num_blocks=11)
    for name, token, pause in (("slow", 1, 1000.0), ("quick", 2, 100.0)):
        for turn in range(3):
            served(driver, f"{name}{turn}", token, 3, session=name)
            driver.now += pause if turn < 2 else 0.0
    served(driver, "big", 3, 5)
    assert served(driver, "quick again", 2, 3) == 12
    assert served(driver, "slow again", 1, 3) < 12


def test_what_a_sub_agent_computed_goes_first_once_its_caller_goes_on():
    """Also before what was used longer ago; and if it is continued all the same, it is kept as any other."""
    driver = driver_of(PREDICTED, num_blocks=14)
    served(driver, "old", 9, 3)
    for name, token, length in (("caller", 1, 3), ("helper", 2, 3), ("caller goes on", 1, 4)):
        served(driver, name, token, length, session="agent")
    served(driver, "big", 3, 6)
    assert served(driver, "old again", 9, 3) == 12
    assert served(driver, "helper again", 2, 3, session="agent") == 0


class Checked(Watching):
    """Checks at every eviction that nothing cached continues what goes."""

    def plan(self):
        order = self.scheduler.kv.pool.cached
        if "pop" not in vars(order):
            pop = order.pop

            def checked() -> int:
                content = self.scheduler.kv.prefix.content
                block = pop()
                gone = content(block)
                rest = [other for other in range(self.scheduler.limits.num_blocks) if other in order]
                assert all(content(other).before is not gone for other in rest)
                return block

            order.pop = checked
        return super().plan()


PROMPTS = st.lists(st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=20), st.sampled_from(("", "a", "b")), st.sampled_from((0.0, 3.0)),
    st.sampled_from(("t", "u"))), min_size=1, max_size=16)


@pytest.mark.parametrize(("share", "found"), [(1.0, 12), (0.5, 12), (0.25, 0), (0.0, 0)])
@pytest.mark.parametrize("policy", [HINTED, PREDICTED])
def test_a_share_that_changes_drops_only_what_exceeds_it(policy, share, found):
    driver = driver_of(policy)
    served(driver, "kept", 1, 3, retain=50.0)
    driver.limits = replace(driver.limits, tenant_cache_share=share)
    driver.configure(driver.discipline, driver.limits.max_num_seqs, 60)
    for number in range(4):
        served(driver, f"n{number}", 10 + number, 4)
    assert served(driver, "again", 1, 3) == found


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.sampled_from(EVICTION_POLICIES), st.sampled_from(EVICTION_POLICIES), st.sampled_from((0.2, 1.0)),
       st.sampled_from((0.2, 0.4)), st.sampled_from((0, 3, 15)))
def test_a_continuation_goes_before_its_prefix_and_no_claim_is_left(prompts, policy, later, share, then, on_host):
    """Also where the order or the share changes while blocks are cached."""
    driver = Checked(limits(num_blocks=10, max_model_len=25, eviction_policy=policy, tenant_cache_share=share,
                            num_host_blocks=on_host), None, None, times())
    for index, (prompt, session, retain, tenant) in enumerate(prompts):
        new = request(f"r{index}", prompt, 2, ignore_eos=True)
        new.spec = replace(new.spec, session=session, retain=retain, slo=SLO(tenant))
        driver.add(new)
        if index == len(prompts) // 2:
            driver.run()
            driver.limits = replace(driver.limits, eviction_policy=later, tenant_cache_share=then)
            driver.configure(driver.discipline, driver.limits.max_num_seqs, 60)
        if index % 3 == 2:
            driver.plan()
            driver.commit()
    driver.run()
    driver.scheduler.check()
    order, below = driver.scheduler.kv.pool.cached, driver.scheduler.kv.host.order
    if isinstance(order, Retained):
        assert all(held <= then * 10 for held in order._num_covered.values())
        driver.scheduler.kv._pop_blocks(10, request("all", [1]), driver.now)
        while len(below):
            below.pop()
        for one in (order, below):
            assert not one._claims and not one._covers and not one._of_tenant and not one._num_covered
