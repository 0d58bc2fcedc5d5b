"""Every miss of the prefix cache has its cause, exact to the token, and says nothing of another tenant."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.beginnings import SYSTEM, limits
from support.toy import Driver

from slotwise.core.cache_causes import CAUSES, NOT_COMPUTED
from slotwise.core.params import SamplingSpec
from slotwise.core.prompt_lookup import AROUND, REMEMBERED, SHINGLE
from slotwise.core.record import ANOTHER_REQUEST, PromptSpan, StepPlan
from slotwise.core.request import Request, RequestSpec
from slotwise.core.scheduler_limits import SLO


class Asking(Driver):
    """Numbers its requests, and remembers the spans of each."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.spans: dict[int, tuple[PromptSpan, ...]] = {}
        self.num_asked = 0

    def plan(self) -> StepPlan:
        plan = super().plan()
        for lookup in plan.lookups:
            self.spans.setdefault(lookup.request_id, lookup.spans)
        assert [one.request_id for one in plan.lookups] == [one.request_id for one in plan.admitted]
        return plan

    def ask(self, prompt: list[int], salt: str = "", tenant: str = "", **fields: int) -> list[tuple[int, str]]:
        """Runs a request to its end; returns where its spans end, and their causes."""
        params = SamplingSpec(max_tokens=1, ignore_eos=True)
        spec = RequestSpec(prompt, params, salt=salt, slo=SLO(tenant), **fields)
        self.num_asked += 1
        self.add(Request(self.num_asked, spec))
        self.run()
        return [(span.end, span.cause) for span in self.last]

    @property
    def last(self) -> tuple[PromptSpan, ...]:
        return self.spans[self.num_asked]


LONG = list(range(100, 140))  # ten blocks


def test_each_cause_in_turn():
    driver = Asking(limits(max_model_len=96))
    assert driver.ask(SYSTEM[:3]) == [(3, "too_short")]
    assert driver.ask(SYSTEM[:4]) == [(4, "last_block")]
    assert driver.ask(LONG) == [(36, "new"), (40, "last_block")]
    assert driver.ask(LONG) == [(36, "found"), (40, "last_block")]
    assert driver.ask([*LONG, 1, 2, 3, 4, 5]) == [(40, "found"), (44, "new"), (45, "last_block")]
    assert driver.ask([*LONG[:18], 1, *LONG[19:]]) == [(16, "found"), (36, "diverged"), (40, "last_block")]
    assert driver.last[1].position == 18
    assert driver.ask(LONG, adapter=1) == [(36, "other_adapter"), (40, "last_block")]
    assert driver.ask(LONG, cache_generation=1) == [(36, "reset"), (40, "last_block")]
    assert Asking(limits(enable_prefix_caching=False)).ask(LONG) == [(40, "disabled")]
    driver.scheduler.add(Request(99, RequestSpec(LONG, SamplingSpec(prompt_logprobs=1))), driver.now)
    assert driver.scheduler.schedule(driver.now).lookups == ((99, (PromptSpan(40, "whole_prompt"),)),)


def test_the_nearest_of_several_prompts_counts_and_its_beginning_too():
    driver = Asking(limits(num_blocks=64))
    for last in (1, 2, 3):
        driver.ask([*SYSTEM[:5], *[last] * 8])
    assert driver.ask([*SYSTEM[:5], 2, 2, 7, *SYSTEM]) == [(4, "found"), (16, "diverged"), (20, "last_block")]
    assert driver.last[1].position == 7
    assert driver.ask([SYSTEM[0], *[9] * 9]) == [(8, "diverged"), (10, "last_block")]
    assert driver.last[0].position == 1
    assert driver.ask([50] * 10) == [(8, "new"), (10, "last_block")]


@pytest.mark.parametrize(("tenant", "named"), [("a", 2), ("b", ANOTHER_REQUEST)])
def test_an_evicted_span_names_only_a_request_of_its_own_tenant(tenant, named):
    driver = Asking(limits(num_blocks=12, max_model_len=48))
    driver.ask(LONG, "a", "a")
    driver.now += 0.25
    driver.ask([token + 50 for token in LONG[:38]], tenant, tenant)  # ten blocks: those of LONG but two are evicted
    evicted_at = driver.plans[-1].now
    assert driver.ask(LONG, "a", "a") == [(8, "found"), (36, "evicted"), (40, "last_block")]
    span = driver.last[1]
    assert span.request_id == named
    assert span.at == (evicted_at if named == 2 else round(evicted_at))


def test_what_is_remembered_of_evicted_blocks_is_bounded():
    driver = Asking(limits(num_blocks=12, max_model_len=48))
    for number in range(40):
        driver.ask([number] * 40)
    prompts = driver.scheduler.kv.prompts
    assert len(prompts._evicted) == REMEMBERED * 12
    assert sum(map(len, prompts._diverged.values())) <= 32


def test_another_salt_is_named_to_its_owner_alone():
    driver = Asking(limits(num_blocks=64))
    driver.ask(LONG, "key:one", "key")
    assert driver.ask(LONG, "key:two", "key") == [(36, "other_salt"), (40, "last_block")]
    assert driver.ask(LONG, "yek:two", "yek") == [(36, "new"), (40, "last_block")]
    for tenant in ("", "key"):  # a server without keys: a salt is a secret, and a name is free
        assert driver.ask(LONG, f"of a user of {tenant}", tenant) == [(36, "new"), (40, "last_block")]


def test_the_tokens_around_a_divergence_while_they_are_cached():
    driver = Asking(limits(num_blocks=64, max_model_len=128))
    tail = [token % 97 for token in range(200, 260)]
    driver.ask([*SYSTEM, 1, 2, *tail])
    driver.ask([*SYSTEM, 1, 3, 4, *tail])
    prompts = driver.scheduler.kv.prompts
    [told] = prompts.diverged([2])
    assert told.before == (*SYSTEM[-4:], 1)[-AROUND:]
    assert told.own == (3, 4, *tail)[:AROUND] and told.nearest == (2, *tail)[:AROUND]
    assert told.num_compared - told.num_same in (2, 3), "all but the changed tokens stand in both"
    driver.ask([*SYSTEM, 1, 9, *range(100, 160)])
    [told] = prompts.diverged([3])
    assert told.num_same < SHINGLE
    for number in range(20):
        driver.ask([number + 40] * 60)
    assert [(one.before, one.own, one.nearest) for one in prompts.diverged([2])] in ([], [((), (), ())])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(9, 40), st.integers(0, 8))
def test_spans_cover_every_prompt_and_nothing_depends_on_other_tenants(seed, num_blocks, num_host_blocks):
    """The tenant's spans next to another tenant are those without it, but for what the other one evicted."""
    draw = Random(seed)
    prompts = [(draw.choice("ab"), draw.choice(["", ":x"]), draw.randrange(2),
                [draw.randrange(2) for _ in range(draw.randrange(1, 30))]) for _ in range(25)]
    numbers = replace(limits(num_blocks=num_blocks, max_model_len=32), num_host_blocks=num_host_blocks)
    both, ample = Asking(numbers), replace(limits(num_blocks=400, max_model_len=32))
    together, apart = Asking(ample), {"a": Asking(ample), "b": Asking(ample)}
    owners = {}
    for tenant, salt, adapter, prompt in prompts:
        for driver in (both, together):
            driver.ask(prompt, tenant + salt, tenant, adapter=adapter)
        apart[tenant].ask(prompt, tenant + salt, tenant, adapter=adapter)
        owners[both.num_asked] = tenant
        assert together.last == apart[tenant].last, "nothing is evicted: another tenant changes nothing"
        ends = [span.end for span in both.last]
        assert ends == sorted(set(ends)) and ends[-1] == len(prompt)
        assert {span.cause for span in both.last} <= set(CAUSES)
        found = max([span.end for span in both.last if span.cause in NOT_COMPUTED], default=0)
        [cached] = [one.num_cached for plan in both.plans for one in plan.admitted if one.request_id == both.num_asked]
        assert found == cached
        for span in both.last:
            assert span.request_id == ANOTHER_REQUEST or owners[span.request_id] == tenant
        for told in both.scheduler.kv.prompts.diverged([both.num_asked]):
            at = both.last[-2].position if told.own else 0
            assert (*told.before, *told.own) == tuple(prompt[at - len(told.before) : at + len(told.own)])
            assert not told.own or told.nearest[:1] != told.own[:1]
    both.scheduler.check()
