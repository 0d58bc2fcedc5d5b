"""Prompts of other engines: what arrives is used, what is late is computed, and what is pinned is released in time.

The executor's cache holds digests of all tokens before a position, and an arrival writes them: a block written for the
wrong request, or counted before it is there, fails an assertion.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from support.toy import VOCAB, Driver, alone, in_seed, request

from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.reasons import WAITING_FOR_KV
from slotwise.core.record import ReceivedBlocks
from slotwise.core.request import KVTransfer, Request, State
from slotwise.core.scheduler_limits import SLO, SchedulerLimits

TIMEOUT = 6.0  # seconds
LIMITS = SchedulerLimits(max_model_len=60, num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=10,
                         enable_prefix_caching=True)
SEEN: Counter[str] = Counter()


class Network(Driver):
    """A scheduler to whose requests other engines send blocks, and from which they read them."""

    def arrive(self, waiting: Request, num_blocks: int, *, is_last: bool) -> None:
        """The first blocks of a prompt are there."""
        self.executor.write(waiting.tokens[: num_blocks * self.limits.block_size], waiting.blocks)
        self.scheduler.received(ReceivedBlocks(waiting.request_id, num_blocks, is_last), self.now)
        self.scheduler.check()

    def run_until_ended(self, name: str) -> None:
        """Step until a request has ended; a producer's pins may remain."""
        for _ in range(100):
            if name in self.ended:
                return
            self.plan()
            self.commit()
        raise AssertionError(f"{name} has not ended")

    @property
    def waiting(self) -> list[Request]:
        return list(self.scheduler.transfers.receiving())


def remote(name: str, prompt: list[int], max_tokens: int = 6) -> Request:
    new = request(name, prompt, max_tokens)
    new.kv = KVTransfer(name, False, TIMEOUT)
    return new


def offered(name: str, prompt: list[int]) -> Request:
    new = request(name, prompt, 1)
    new.kv = KVTransfer(name, True, 20 * TIMEOUT)
    return new


def test_a_request_waits_with_a_reason_and_computes_its_last_token():
    network, prompt = Network(LIMITS), list(range(1, 19))
    new = remote("a", prompt)
    expected = alone(new, LIMITS)
    network.add(new)
    plan = network.plan()
    assert [tuple(one) for one in plan.refused] == [("a", WAITING_FOR_KV)]
    assert not plan.slots and new.state is State.WAITING_FOR_KV
    network.commit()
    network.arrive(new, 3, is_last=False)
    assert new.num_computed == 12 and not network.plan().slots
    network.commit()
    network.arrive(new, 5, is_last=True)
    assert network.plan().counts == (1,)
    network.commit()
    network.run()
    assert network.output["a"] == expected


def test_what_is_late_is_computed():
    network = Network(LIMITS)
    new = remote("a", list(range(1, 19)))
    expected = alone(new, LIMITS)
    network.add(new)
    network.plan()
    network.commit()
    network.arrive(new, 2, is_last=False)
    network.now += TIMEOUT
    assert network.plan().starts == (8,)
    network.arrive(new, 5, is_last=True)  # too late: it changes nothing
    network.commit()
    network.run()
    assert network.output["a"] == expected


def test_blocks_stay_pinned_until_they_are_read_or_time_is_over():
    for is_read in (True, False):
        network = Network(LIMITS)
        network.add(offered("a", list(range(1, 19))))
        network.plan()
        network.commit()
        assert [len(blocks) for blocks in network.scheduler.transfers.readable({"a"}).values()] == [2]
        while network.scheduler.has_work:
            network.plan()
            network.commit()
        assert network.scheduler.num_free_blocks == LIMITS.num_blocks - 5
        assert [len(blocks) for blocks in network.scheduler.transfers.readable({"a"}).values()] == [5]
        if is_read:
            network.scheduler.acknowledged("a")
        else:
            network.now += 20 * TIMEOUT
            network.plan()
        assert network.scheduler.num_free_blocks == LIMITS.num_blocks
        network.scheduler.check()


def test_a_prompt_that_is_not_wanted_any_more_is_not_pinned():
    network = Network(LIMITS)
    network.add(offered("a", list(range(1, 19))))
    network.plan()
    network.scheduler.acknowledged("a")
    network.commit()
    network.run()
    assert network.scheduler.num_free_blocks == LIMITS.num_blocks


def test_any_order_of_events_loses_nothing():
    SEEN.clear()
    for seed in range(80):
        with in_seed(seed):
            live(Random(seed))
    for kind in ("partly", "wholly", "late", "preempted", "acknowledged", "expired", "given up"):
        assert SEEN[kind] >= 20, f"{kind} hardly ever happened: {SEEN}"


def live(draw: Random) -> None:
    limits = replace(LIMITS, enable_prefix_caching=draw.random() < 0.7)
    policy = draw.choice(("fcfs", "priority", "fair", "shortest", "program"))
    network = Network(limits, policy=Ordering(policy).policy((), None))
    expected: dict[str, list[int]] = {}
    for _ in range(150):
        match draw.choices(("add", "arrive", "acknowledge", "abort", "jump", "step"), (12, 30, 12, 2, 3, 60))[0]:
            case "add":
                name, prompt = f"r{len(expected)}", [draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 30))]
                made = draw.choice((remote, remote, offered, request))(name, prompt)
                new = of(draw.choice(("a", "b", "")), made, draw.choice((0, 0, 1)))
                expected[name] = alone(new, LIMITS)
                network.add(new)
            case "arrive" if network.waiting:
                one = draw.choice(network.waiting)
                most = -(-len(one.tokens) // LIMITS.block_size)
                first = one.num_computed // LIMITS.block_size
                is_last = draw.random() < 0.5
                number = most if is_last and draw.random() < 0.7 else draw.randint(first, most)
                SEEN["wholly" if number == most else "partly"] += 1
                network.arrive(one, number, is_last=is_last)
            case "acknowledge" if expected:
                before = network.scheduler.transfers.num_pinned_blocks
                network.scheduler.acknowledged(draw.choice(list(expected)))
                SEEN["acknowledged"] += network.scheduler.transfers.num_pinned_blocks < before
            case "abort":
                network.finish(f"r{draw.randrange(len(expected) + 1)}")
            case "jump":
                before = network.scheduler.transfers.num_pinned_blocks
                SEEN["late"] += len(network.waiting)
                network.now += 20 * TIMEOUT
                SEEN["expired"] += before > 0
            case "step" if len(network.flying) < 2 and (not network.flying or draw.random() < 0.5):
                network.plan()
                SEEN["given up"] += len(network.scheduler.transfers.lost_blocks)
            case "step":
                network.commit()
    network.run()
    network.now += 20 * TIMEOUT
    network.plan()
    SEEN["preempted"] += len(network.preempted)
    assert network.scheduler.num_free_blocks == LIMITS.num_blocks
    assert set(network.ended) == set(expected)
    for name, reason in network.ended.items():
        assert reason == "abort" or network.output.get(name, []) == expected[name]


def of(tenant: str, new: Request, priority: int = 0) -> Request:
    new.spec = replace(new.spec, slo=SLO(tenant, priority=priority))
    return new


def test_prompts_that_never_arrive_hold_no_slot_and_delay_no_other_tenant():
    network = Network(LIMITS)
    for index in range(500):
        network.add(of("flood", remote(f"f{index}", [1, 2, 3])))
    other = request("other", list(range(1, 9)), 4)
    network.add(of("other", other))
    network.add(of("third", remote("third", list(range(1, 9)))))
    plan = network.plan()
    assert network.admitted == ["other"] and other.state is State.RUNNING
    assert "third" in [one.request_id for one in network.waiting]  # the flood leaves it a place
    assert {one.reason for one in plan.refused} == {WAITING_FOR_KV} and len(plan.refused) <= LIMITS.max_num_seqs
    network.commit()
    while "other" not in network.ended:
        network.plan()
        network.commit()
    assert network.now == 4.0  # seconds: one for each token


def test_a_landing_that_was_silent_leaves_its_place_to_the_next_one_of_its_tenant():
    network = Network(LIMITS)
    for index in range(20):
        network.add(of("flood", remote(f"f{index}", [1, 2, 3])))
    seen = set()
    while network.scheduler.has_work:
        network.plan()
        seen |= {one.request_id for one in network.waiting}
        network.commit()
    assert seen == set(network.ended) == {f"f{index}" for index in range(20)}


def test_a_request_that_waits_for_another_engine_obeys_its_deadline():
    network = Network(LIMITS)
    for index in range(8):  # some of which have no place to land
        new = remote(f"r{index}", [1, 2, 3])
        new.kv, new.deadline = new.kv._replace(timeout=100.0), 2.0
        network.add(new)
    network.plan()
    assert 0 < len(network.waiting) < 8
    network.commit()
    network.now = 2.0
    network.plan()
    assert set(network.ended.values()) == {"timeout"} and len(network.ended) == 8


def test_pins_that_no_engine_reads_leave_the_cache_to_others():
    network = Network(LIMITS)
    for index in range(9):
        network.add(of("flood", offered(f"f{index}", [index + 1, *range(1, 18)])))
        network.run_until_ended(f"f{index}")
    assert network.scheduler.num_free_blocks <= 5  # nothing else needs the others
    began = network.now
    network.add(of("other", request("other", list(range(1, 40)), 4)))  # 10 blocks
    network.run_until_ended("other")
    assert network.now - began == 7.0 and not network.preempted  # seconds: four chunks, and three more tokens


def test_the_oldest_pins_are_released_first_and_no_more_than_needed():
    network = Network(LIMITS)
    for index in range(3):
        network.add(of(str(index), offered(f"r{index}", [index + 1, *range(1, 18)])))
        network.run_until_ended(f"r{index}")
    network.add(request("big", list(range(1, 29)), 1))  # 7 blocks, and 5 are free
    network.run_until_ended("big")
    left = network.scheduler.transfers.readable({"r0", "r1", "r2"})
    assert set(left) == {"r1", "r2"}


def test_pins_beyond_a_tenants_share_take_the_place_of_its_own():
    network = Network(LIMITS)
    network.add(of("quiet", offered("quiet", [9, *range(1, 8)])))
    network.run_until_ended("quiet")
    for index in range(9):
        network.add(of("flood", offered(f"f{index}", [index + 1, *range(1, 14)])))
        network.run_until_ended(f"f{index}")
        assert "quiet" in network.scheduler.transfers.readable({"quiet"})
    left = network.scheduler.transfers.readable({f"f{index}" for index in range(9)})
    assert 0 < len(left) < 5 and "f8" in left and "f0" not in left


def test_running_rows_take_the_blocks_of_requests_that_have_landed():
    network = Network(LIMITS)
    for index in range(2):
        new = of(f"t{index}", remote(f"r{index}", [index + 1, *range(1, 18)]))
        new.kv = new.kv._replace(timeout=100.0)
        network.add(new)
    network.plan()
    network.commit()
    assert len(network.waiting) == 2
    long = request("long", list(range(1, 34)), 24)
    expected = [alone(new, LIMITS) for new in (long, *network.waiting)]
    network.add(long)
    while "long" not in network.ended:
        network.plan()
        network.commit()
    assert not network.preempted
    network.run()
    assert [network.output[name] for name in ("long", "r0", "r1")] == expected


def test_what_has_arrived_waits_for_a_slot_with_its_blocks():
    network = Network(replace(LIMITS, max_num_seqs=1))
    network.add(request("before", [5, 6], 6))
    new = remote("a", list(range(1, 19)))
    expected = alone(new, LIMITS)
    network.add(new)
    network.plan()
    network.commit()
    network.arrive(new, 5, is_last=True)
    assert new.state is State.WAITING and not new.holds_slot and network.scheduler.num_waiting == 1
    network.run()
    assert network.output["a"] == expected
    assert [plan.counts for plan in network.plans if plan.new_requests] == [(2,), (1,)]
