"""Prompts of other engines: what arrives is used, what is late is computed, and what is pinned is released in time.

The executor's cache holds digests of all tokens before a position, and an arrival writes them: a block written for the
wrong request, or counted before it is there, fails an assertion.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from toy import VOCAB, Driver, alone, request

from slotwise.core.limits import SchedulerLimits
from slotwise.core.reasons import WAITING_FOR_KV
from slotwise.core.request import Request, State
from slotwise.core.step import Arrival, KVTransfer
from slotwise.policies.settings import Ordering

TIMEOUT = 6.0  # seconds
LIMITS = SchedulerLimits(max_model_len=60, num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=10,
                         enable_prefix_caching=True)
SEEN: Counter[str] = Counter()


class Network(Driver):
    """A scheduler to whose requests other engines send blocks, and from which they read them."""

    def arrive(self, waiting: Request, num_blocks: int, *, is_last: bool) -> None:
        """The first blocks of a prompt are there."""
        size = self.limits.block_size
        digest = 0
        for position, token in enumerate(waiting.tokens[: num_blocks * size]):
            digest = hash((digest, token))
            self.executor._cache[waiting.blocks[position // size], position % size] = digest
        self.scheduler.transfers.received(Arrival(waiting.request_id, num_blocks, is_last), self.now)
        self.scheduler.check()

    @property
    def waiting(self) -> list[Request]:
        return list(self.scheduler.transfers.receiving())


def remote(name: str, prompt: list[int], max_tokens: int = 6) -> Request:
    new = request(name, prompt, max_tokens)
    new.kv = KVTransfer(name, False, TIMEOUT)
    return new


def offered(name: str, prompt: list[int]) -> Request:
    new = request(name, prompt, 1)
    new.kv = KVTransfer(name, True, TIMEOUT)
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
            network.scheduler.transfers.acknowledged("a")
        else:
            network.now += TIMEOUT
            network.plan()
        assert network.scheduler.num_free_blocks == LIMITS.num_blocks
        network.scheduler.check()


def test_a_prompt_that_is_not_wanted_any_more_is_not_pinned():
    network = Network(LIMITS)
    network.add(offered("a", list(range(1, 19))))
    network.plan()
    network.scheduler.transfers.acknowledged("a")
    network.commit()
    network.run()
    assert network.scheduler.num_free_blocks == LIMITS.num_blocks


def test_any_order_of_events_loses_nothing():
    SEEN.clear()
    many_networks()
    for kind in ("partly", "wholly", "late", "preempted", "acknowledged", "expired"):
        assert SEEN[kind] >= 20, f"{kind} hardly ever happened: {SEEN}"


@settings(max_examples=80, deadline=None, database=None)
@given(st.integers(0, 2**64))
def many_networks(seed: int) -> None:
    draw = Random(seed)
    network = Network(LIMITS, policy=Ordering("priority").policy((), None) if draw.random() < 0.5 else None)
    expected: dict[str, list[int]] = {}
    for _ in range(150):
        match draw.choices(("add", "arrive", "acknowledge", "abort", "jump", "step"), (12, 30, 12, 2, 3, 60))[0]:
            case "add":
                name, prompt = f"r{len(expected)}", [draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 30))]
                new = draw.choice((remote, remote, offered, request))(name, prompt)
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
                network.scheduler.transfers.acknowledged(draw.choice(list(expected)))
                SEEN["acknowledged"] += network.scheduler.transfers.num_pinned_blocks < before
            case "abort":
                network.finish(f"r{draw.randrange(len(expected) + 1)}")
            case "jump":
                before = network.scheduler.transfers.num_pinned_blocks
                SEEN["late"] += len(network.waiting)
                network.now += TIMEOUT
                SEEN["expired"] += before > 0
            case "step" if len(network.flying) < 2 and (not network.flying or draw.random() < 0.5):
                network.plan()
            case "step":
                network.commit()
    network.run()
    network.now += TIMEOUT
    network.plan()
    SEEN["preempted"] += len(network.preempted)
    assert network.scheduler.num_free_blocks == LIMITS.num_blocks
    assert set(network.ended) == set(expected)
    for name, reason in network.ended.items():
        assert reason == "abort" or network.output.get(name, []) == expected[name]
