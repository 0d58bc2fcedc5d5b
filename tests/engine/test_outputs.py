"""Large outputs of one step reach the API process in messages of bounded size."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import record_of
from support.toy import named

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import Outcome, RequestEnd, StepRecord, TokenLogprobs
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.client import EngineClient
from slotwise.engine.ipc import (
    MAX_ENTRIES,
    MAX_MESSAGE,
    BlockingChannel,
    HeartbeatMonitor,
    encode,
    frame,
    messages_of,
    pair,
)
from slotwise.engine.messages import EngineInfo, StepOutputs
from slotwise.engine.record_codec import StepReport, unpacked
from slotwise.engine.scheduling import Scheduling

LIMITS = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
INFO = EngineInfo("toy", "cpu", "float32", 50, LIMITS, Scheduling(Batching(), max_num_seqs=8,
                                                                  max_num_batched_tokens=32), (1,))


def a_record(lengths: list[int], top: int) -> StepRecord:
    """Rows 0, 1, ... of these lengths, with `top` log-probabilities a token."""
    tokens = tuple([tuple(range(row, row + length)) for row, length in enumerate(lengths)])
    entry = TokenLogprobs(-0.123456, 3, tuple(range(1000, 1000 + top)), (-1.23456,) * top)
    return record_of(
        5, 1, 2, tuple(range(len(lengths))), tuple(range(len(lengths))), (0,) * len(lengths),
        (1,) * len(lengths), tokens=tokens, logprobs=tuple([(entry,) * length for length in lengths]))


@given(st.lists(st.integers(0, 5000), max_size=20), st.integers(0, 20))
def test_parts_are_bounded_and_hold_every_output_in_order(lengths: list[int], top: int) -> None:
    record = a_record(lengths, top)
    expected = {name: tuple(zip(tokens, some, strict=True)) for name, tokens, some in zip(
        record.plan.request_ids, record.tokens, record.logprobs, strict=True)}
    *parts, last = messages_of(record)
    assert last.num_parts == len(parts) and unpacked(last).tokens == record.tokens
    found: dict[str, tuple[Any, ...]] = dict.fromkeys(expected, ())
    for part in parts:
        assert sum((1 + top) * len(tokens) for tokens in part.token_ids) <= MAX_ENTRIES
        for name, tokens, some in zip(part.request_ids, part.token_ids, part.logprobs, strict=True):
            found[name] += tuple(zip(tokens, some, strict=True))
    whole = unpacked(last)
    if not parts:
        found = {name: tuple(zip(tokens, some, strict=True)) for name, tokens, some in zip(
            whole.plan.request_ids, whole.tokens, whole.logprobs, strict=True)}
    assert found == expected and (not parts or not whole.logprobs)


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=8), st.integers(0, 20))
def test_prompts_are_sent_in_parts_that_say_their_positions(lengths: list[int], top: int) -> None:
    entry = TokenLogprobs(-0.5, 1, tuple(range(top)), (-0.5,) * top)
    rows = tuple([tuple([entry._replace(rank=place) for place in range(length)]) for length in lengths])
    record = record_of(
        5, 1, 2, tuple(range(len(rows))), tuple(range(len(rows))), tuple(range(0, 7 * len(rows), 7)),
        tuple([max(1, length) for length in lengths]), tokens=((),) * len(rows), prompt_logprobs=rows)
    starts = dict(zip(record.plan.request_ids, record.plan.starts, strict=True))
    found: dict[str, list[int]] = {name: [] for name in starts}
    *parts, last = messages_of(record)
    whole = unpacked(last)
    for ids, begins, entries in (*[(part.request_ids, part.starts, part.prompt_logprobs) for part in parts],
                                 (whole.plan.request_ids, whole.plan.starts, whole.result.prompt_logprobs)):
        assert sum((1 + top) * len(some) for some in entries) <= MAX_ENTRIES
        for name, start, some in zip(ids, begins, entries, strict=False):
            assert not some or start == starts[name] + len(found[name])
            found[name] += [one.rank for one in some]
    assert list(found.values()) == [list(range(length)) for length in lengths]


def test_a_batch_larger_than_any_message_is_sent_in_small_ones() -> None:
    sizes = [len(frame(encode(message))) for message in messages_of(a_record([1000] * 300, 20))]
    assert sum(sizes) > MAX_MESSAGE and max(sizes) < MAX_MESSAGE // 30


def test_a_message_that_the_other_end_would_refuse_is_not_sent() -> None:
    ours, theirs = pair()
    with ours, theirs:
        with pytest.raises(ValueError, match="too large to be sent"):
            BlockingChannel(ours).send(bytes(MAX_MESSAGE + 1))
        BlockingChannel(ours).send(b"small")
        assert BlockingChannel(theirs).receive(1.0) == [b"small"]


def test_the_client_hands_out_the_parts_before_the_end() -> None:
    async def play() -> None:
        ours, theirs = pair()
        client = EngineClient()
        channel = BlockingChannel(theirs)
        channel.send(encode(INFO))
        assert isinstance(await client.attach(ours, HeartbeatMonitor(60)), EngineInfo)
        params = SamplingSpec(max_tokens=5000, logprobs=20)
        generations = [client.submit(named(str(row), RequestSpec([1], params))) for row in range(3)]
        record = a_record([2000, 3000, 1000], 20)
        expected = list(zip(record.tokens, record.logprobs, strict=True))
        record = record._replace(outcome=Outcome(ended=(RequestEnd(0, "length", 2000), RequestEnd(2, "length", 1000))))
        messages = list(messages_of(record))
        assert [type(message) for message in messages] == [StepOutputs] * (len(messages) - 1) + [StepReport]
        for message in messages:
            await asyncio.to_thread(channel.send, encode(message))
        while not generations[0].ended:
            await asyncio.sleep(0.002)
        for generation, (tokens, logprobs), ended in zip(generations, expected, (True, False, True), strict=True):
            chunk = await anext(generation)
            assert (tuple(chunk.token_ids), tuple(chunk.logprobs)) == (tokens, logprobs)
            assert generation.ended == ended
        client.give_up("enough")
        theirs.close()

    asyncio.run(play())


def test_the_last_token_of_a_part_comes_with_the_end_that_the_record_tells() -> None:
    """A consumer that reads between the messages of a step must not take a stop token for text."""
    async def play() -> None:
        ours, theirs = pair()
        client = EngineClient()
        channel = BlockingChannel(theirs)
        channel.send(encode(INFO))
        await client.attach(ours, HeartbeatMonitor(60))
        params = SamplingSpec(max_tokens=5000, logprobs=20)
        ending, running = [client.submit(named(str(row), RequestSpec([1], params))) for row in range(2)]
        record = a_record([2000, 1000], 20)
        (tokens, others), (logprobs, _) = record.tokens, record.logprobs
        record = record._replace(outcome=Outcome(ended=(RequestEnd(0, "stop", 2000),)))
        *parts, last = messages_of(record)
        for part in parts:
            await asyncio.to_thread(channel.send, encode(part))
        read: list[int] = []
        while len(read) < len(tokens) - 1:
            chunk = await anext(ending)
            assert chunk.finish_reason is None and len(chunk.logprobs) == len(chunk.token_ids)
            read += chunk.token_ids
        channel.send(encode(last))
        chunk = await anext(ending)
        assert (tuple(chunk.token_ids), tuple(chunk.logprobs)) == (tokens[-1:], logprobs[-1:])
        assert chunk.finish_reason == "stop" and (*read, *chunk.token_ids) == tokens
        assert tuple((await anext(running)).token_ids) == others
        client.give_up("enough")
        theirs.close()

    asyncio.run(play())
