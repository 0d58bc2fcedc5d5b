"""A prompt is computed by one engine and used by another, over both connectors."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.apart import LIMITS, Pair
from support.records import admitted_of, cached_of
from support.toy import alone, request

from slotwise.core.params import SamplingSpec
from slotwise.core.reasons import WAITING_FOR_KV
from slotwise.core.request import KVTransfer, RequestSpec
from slotwise.core.transfer.kv_transfer_config import CONNECTORS, TCP
from slotwise.engine.messages import UNSUBMITTED, Add
from slotwise.measure.simulate.replay import replay
from slotwise.observe import event_log

PROMPT = [(7 * index) % 23 for index in range(50)]


def expected(prompt: list[int], max_tokens: int = 8) -> list[int]:
    return alone(request("alone", prompt, max_tokens), LIMITS)


@pytest.fixture(params=CONNECTORS)
def pair(request: pytest.FixtureRequest):
    pair = Pair(request.param, timeout=30.0)
    yield pair
    pair.close()


def test_only_the_last_token_of_a_prompt_is_computed_twice(pair):
    pair.prefill("a", PROMPT)
    pair.decode("a", PROMPT)
    pair.run()
    assert pair.consumer.tokens["a"] == expected(PROMPT)
    assert pair.producer.num_computed == len(PROMPT)
    assert pair.consumer.num_computed == 1
    assert WAITING_FOR_KV in pair.consumer.waits
    pair.check_nothing_is_left()


def test_the_consumer_may_come_first_or_long_after(pair):
    pair.decode("early", PROMPT)
    for _ in range(3):
        pair.consumer.step()
    pair.prefill("early", PROMPT)
    pair.run()
    other = PROMPT[::-1]
    pair.prefill("late", other)
    pair.run(lambda: "late" in pair.producer.ended)
    assert pair.producer.scheduler.transfers.num_pinned_blocks == 13
    pair.decode("late", other)
    pair.run()
    assert [pair.consumer.tokens[name] for name in ("early", "late")] == [expected(PROMPT), expected(other)]
    assert pair.consumer.num_computed == 2
    pair.check_nothing_is_left()


def test_blocks_of_a_committed_chunk_are_sent_before_the_prompt_is_computed(pair):
    pair.prefill("a", PROMPT)
    pair.decode("a", PROMPT)
    pair.consumer.step()
    pair.producer.step()  # the first chunk
    (waiting,) = pair.consumer.scheduler.transfers.receiving()
    transfer = pair.consumer.link._receiver._transfers[waiting.request_id]
    end = time.monotonic() + 120.0
    while transfer.num_arrived < 4:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert not pair.producer.ended
    pair.run()
    assert pair.consumer.num_computed == 1


def test_both_sides_use_their_prefix_caches(pair):
    for name, prompt in (("a", PROMPT), ("b", [*PROMPT[:40], 1, 2, 3, 4, 5, 6, 7])):
        pair.prefill(name, prompt)
        pair.decode(name, prompt)
        pair.run()
        assert pair.consumer.tokens[name] == expected(prompt)
    assert pair.producer.num_computed == len(PROMPT) + 7
    assert pair.consumer.num_computed == 2
    (cached,) = [cached_of(record) for record in pair.consumer.records
                 if pair.consumer.names.index("b") in admitted_of(record)]
    assert cached == (40,)  # of what the first transfer brought
    pair.timeout = 0.2
    pair.decode("c", PROMPT)  # a transfer of this name is neither offered nor needed
    pair.run()
    assert pair.consumer.tokens["c"] == expected(PROMPT)


def test_an_unknown_transfer_and_another_prompt_are_computed_here():
    pair = Pair(TCP, timeout=0.2)
    pair.decode("unknown", PROMPT)
    pair.run()
    pair.prefill("other", PROMPT)
    pair.decode("other", PROMPT[::-1])
    pair.run()
    assert pair.consumer.tokens == {"unknown": expected(PROMPT), "other": expected(PROMPT[::-1])}
    failures = [arrival.failure for record in pair.consumer.records for arrival in record.inputs.arrivals]
    assert failures == ["there is no such transfer", "the prompt is another one"]
    pair.check_nothing_is_left()
    pair.close()


def test_pinned_blocks_are_released_in_time_if_no_consumer_asks(pair):
    pair.prefill("a", PROMPT, timeout=0.05)
    pair.run(lambda: "a" in pair.producer.ended)
    assert pair.producer.scheduler.num_free_blocks == LIMITS.num_blocks - 13
    pair.run()
    pair.check_nothing_is_left()


@pytest.mark.parametrize("why", ["all is cached", "it has ended in the queue"])
@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_a_consumer_that_needs_no_block_says_so(pair, why, first):
    pair.prefill("before", PROMPT)
    pair.decode("before", PROMPT)
    pair.run()
    prompt = PROMPT[:49] if why == "all is cached" else PROMPT[::-1]  # 12 blocks, and the token to compute
    turns = [lambda: pair.prefill("a", prompt, timeout=600.0), lambda: _decoded_or_left(pair, prompt, why)]
    for turn in turns if first == "producer" else turns[::-1]:
        turn()
    pair.run()  # it would take the pin's ten minutes
    assert ("a" in pair.consumer.tokens) == (why == "all is cached") and pair.consumer.num_computed <= 2
    pair.check_nothing_is_left()


def _decoded_or_left(pair: Pair, prompt: list[int], why: str) -> None:
    pair.decode("a", prompt)
    if why != "all is cached":
        pair.consumer.abort("a")


def test_requests_wait_for_pinned_blocks_and_run_when_these_are_released():
    pair = Pair(TCP, limits=replace(LIMITS, num_blocks=20))
    pair.prefill("a", PROMPT, timeout=0.05)
    pair.run(lambda: "a" in pair.producer.ended)
    pair.prefill("b", PROMPT[::-1], timeout=0.05)
    pair.run()
    assert pair.producer.ended["b"] == "length"
    pair.check_nothing_is_left()
    pair.close()


def test_a_request_that_ends_while_it_waits_writes_nothing_more(pair):
    pair.decode("a", PROMPT)
    pair.consumer.step()
    pair.consumer.scheduler.finish("a", "abort", 0.0)
    pair.decode("b", PROMPT[::-1])
    pair.prefill("a", PROMPT, timeout=0.05)
    pair.prefill("b", PROMPT[::-1])
    pair.run()
    assert pair.consumer.tokens["b"] == expected(PROMPT[::-1])
    pair.check_nothing_is_left()


def test_both_logs_can_be_replayed(pair):
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1]), ("c", PROMPT[:9])):
        pair.prefill(name, prompt)
        pair.decode(name, prompt)
    pair.run()
    for side in (pair.producer, pair.consumer):
        assert any(record.inputs.arrivals or record.inputs.acknowledged for record in side.records)
        outcome = replay(event_log.decode(event_log.encode(entry)) for entry in side.log.entries)
        assert outcome.difference is None
        assert outcome.records == len(side.records)


def test_two_requests_of_one_transfer_are_refused(pair):
    pair.prefill("a", PROMPT)
    pair.producer.handle(Add(
        UNSUBMITTED, RequestSpec(PROMPT, SamplingSpec(max_tokens=1), kv=KVTransfer("a", True, 0.05)), name="b"))
    pair.run(lambda: len(pair.producer.ended) == 2)
    assert pair.producer.ended == {"a": "length", "b": "rejected"}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_requests_that_wait_are_counted_by_their_reason(connector):
    pair = Pair(connector, timeout=1.0)
    names = [f"r{index}" for index in range(10)]
    for index, name in enumerate(names):
        pair.decode(name, [index, *PROMPT[1:]])
    pair.consumer.step()
    waiting = pair.consumer._recorder.timelines.waiting
    assert waiting.by_reason() == {WAITING_FOR_KV: 10}  # with blocks, or behind those with blocks
    assert pair.consumer.scheduler.num_running == pair.consumer.scheduler.num_waiting == 0
    for name in names:
        pair.consumer.abort(name)
    pair.run()
    pair.check_nothing_is_left()
    pair.close()
