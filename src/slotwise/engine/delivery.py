"""Gives the outputs of steps to the unfinished generations of their requests."""

from __future__ import annotations

from collections.abc import Mapping

from slotwise.engine.generation import Generation
from slotwise.engine.messages import StepOutputs, StepRecord

Live = Mapping[int, Generation]
"""Unfinished generations, by request."""


def deliver(live: Live, outputs: StepRecord | StepOutputs) -> None:
    """Gives each row's tokens, log-probabilities of its prompt and pooled vector to its generation.

    A record whose outputs were sent before it, in parts, releases the last token of each row.
    """
    if isinstance(outputs, StepRecord) and outputs.num_parts:
        _complete(live, outputs)
    else:
        _push_tokens(live, outputs)
    for request_id, start, logprobs in zip(outputs.request_ids, outputs.starts, outputs.prompt_logprobs, strict=False):
        if logprobs and (generation := live.get(request_id)) is not None:
            generation.push_prompt(start, logprobs)
    if isinstance(outputs, StepRecord) and outputs.drafts:
        _count_drafts(live, outputs)
    for request_id, vector in zip(outputs.request_ids, outputs.pooled, strict=False):
        if vector and (generation := live.get(request_id)) is not None:
            generation.pooled = vector


def _push_tokens(live: Live, outputs: StepRecord | StepOutputs) -> None:
    is_part = isinstance(outputs, StepOutputs)
    logprobs = outputs.logprobs or ((),) * len(outputs.token_ids)
    for request_id, tokens, row_logprobs in zip(outputs.request_ids, outputs.token_ids, logprobs, strict=False):
        if tokens:
            generation = live.get(request_id)
            if generation is not None:
                generation.push(tokens, row_logprobs, is_part=is_part)


def _count_drafts(live: Live, record: StepRecord) -> None:
    rows = zip(record.request_ids, record.starts, record.drafts, record.sampled or record.token_ids, strict=True)
    for request_id, start, drafts, tokens in rows:
        generation = live.get(request_id) if drafts and tokens else None
        if generation is not None and generation.num_prompt:
            generation.verified(start + 1 - generation.num_prompt, len(drafts), len(tokens) - 1)


def _complete(live: Live, record: StepRecord) -> None:
    for request_id in record.request_ids:
        if (generation := live.get(request_id)) is not None:
            generation.push((), ())
