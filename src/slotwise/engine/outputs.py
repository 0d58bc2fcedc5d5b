"""Splits a step record whose log-probabilities or vectors are many into messages of bounded size.

    record of a step ──► StepOutputs, StepOutputs, ... , the record without log-probabilities

A discipline that holds outputs publishes a whole batch in one step: with 20 log-probabilities a token takes about 260
bytes, and the batch more than one message may have.  The engine sends the outputs in parts before the record: the API
process decodes each part in a pass of its own loop, and no message exceeds `ipc.MAX_MESSAGE`.  The record keeps the
tokens, which the event log needs; ten million of them fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from slotwise.core.step import TokenLogprobs
from slotwise.engine.messages import StepOutputs, StepRecord

MAX_ENTRIES = 1 << 15  # log-probabilities of a message: about 0.4 MB, and five milliseconds to decode
MAX_POOLED = 4 << 20  # bytes of vectors in a message


def messages_of(record: StepRecord) -> Iterator[StepOutputs | StepRecord]:
    """Yields `record`, or its outputs in parts and then the record without log-probabilities."""
    if sum(map(_num_entries, record.prompt_logprobs)) > MAX_ENTRIES:
        yield from _prompt_parts(record)
        record.prompt_logprobs = ()
    if sum(map(len, record.pooled)) > MAX_POOLED:
        for request_id, vector in zip(record.request_ids, record.pooled, strict=True):
            if vector:
                yield StepOutputs((request_id,), pooled=(vector,))
        record.pooled = ()
    if sum(map(_num_entries, record.logprobs)) > MAX_ENTRIES:
        record.num_parts = 0
        for part in _parts(record):
            record.num_parts += 1
            yield part
        record.logprobs = ()
    yield record


def _prompt_parts(record: StepRecord) -> Iterator[StepOutputs]:
    for request_id, start, logprobs in zip(record.request_ids, record.starts, record.prompt_logprobs, strict=True):
        size = max(1, MAX_ENTRIES // max(1, _num_entries(logprobs[:1])))
        for first in range(0, len(logprobs), size):
            yield StepOutputs((request_id,), starts=(start + first,),
                              prompt_logprobs=(logprobs[first : first + size],))


def _parts(record: StepRecord) -> Iterator[StepOutputs]:
    part = StepOutputs()
    capacity = MAX_ENTRIES
    for request_id, tokens, logprobs in zip(record.request_ids, record.token_ids, record.logprobs, strict=True):
        start = 0
        while start < len(tokens):
            width = max(1, _num_entries(logprobs[start : start + 1]))
            end = min(len(tokens), start + max(1, capacity // width))
            part.request_ids += (request_id,)
            part.token_ids += (tokens[start:end],)
            part.logprobs += (logprobs[start:end],)
            capacity -= (end - start) * width
            start = end
            if capacity < width:
                yield part
                part, capacity = StepOutputs(), MAX_ENTRIES
    if part.request_ids:
        yield part


def _num_entries(logprobs: tuple[TokenLogprobs, ...]) -> int:
    """Log-probabilities of one row: its tokens have the same number each."""
    return len(logprobs) * (1 + len(logprobs[0].top_logprobs)) if logprobs else 0
