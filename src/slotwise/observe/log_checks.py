"""What decoding cannot see of an event log: entries that contradict themselves, and sizes beyond any engine's."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import TYPE_CHECKING

from slotwise.core.step_time import Learned, StepTimeModel
from slotwise.engine.scheduling import Scheduling

if TYPE_CHECKING:
    from slotwise.observe.event_log import RequestEntry, Run, Step

MAX_BLOCKS = 1 << 24  # of a cache; a replay keeps a few dozen bytes for each
MAX_SEQS = 1 << 20
MAX_TOKENS = 1 << 31  # of a row, and of any limit
MAX_DEPTH = 64
MAX_GROUPS = 1024  # of the cache
MAX_RANKS = 1024
MAX_SUM = 1e60  # of what a step-time model has learned


def wrong_request(entry: RequestEntry) -> str:
    """What contradicts itself in a request; "" if nothing does."""
    if len(entry.spec.prompt) not in (0, entry.num_prompt):
        return f"request {entry.number} has {len(entry.spec.prompt)} of {entry.num_prompt} tokens"
    timing = entry.timing
    if any(not 0 <= ns < 2**62 for ns in (timing.received_ns, timing.read_ns, timing.tokenized_ns)):
        return f"request {entry.number} was received at no time"
    return ""


def wrong_step(step: Step) -> str:
    """What contradicts itself in a step; "" if nothing does."""
    rows = len(step.numbers)
    needed: tuple[Sized, ...] = (step.slots, step.starts, step.counts)
    others: tuple[Sized, ...] = (step.padding, step.tokens, step.sampled, step.drafts, step.forced)
    if any(len(column) != rows for column in needed) or any(len(column) not in (0, rows) for column in others):
        return f"the columns of step {step.step} differ in length"
    if step.drafts and not (step.sampled or step.tokens):
        return f"step {step.step} has drafts and no tokens"
    if step.proposing is not None and not (0 <= step.proposing.seconds < MAX_SUM and min(step.proposing) >= 0):
        return f"step {step.step} proposed drafts in no time"
    if any(not (0 <= rank < MAX_RANKS and 0 <= started <= ended < 2**62) for rank, started, ended in step.ranks):
        return f"a rank of step {step.step} worked in no time"
    if len(set(step.numbers)) != rows:
        return f"step {step.step} has two rows of one request"
    if rows and min(step.counts) < 1:
        return f"a row of step {step.step} has no tokens"
    if max((*step.held, *step.failed, *step.prefills), default=-1) >= rows:
        return f"step {step.step} names a row that it does not have"
    if step.stop is not None and all(refused.number != step.stop.first_blocked for refused in step.refused):
        return f"step {step.step} stops at a request that it does not name"
    return _wrong_scheduling(step.configured) if step.configured is not None else ""


def wrong_run(run: Run) -> str:
    """What contradicts itself, or is too large, in the settings of an engine; "" if nothing does."""
    limits = run.limits
    for name, most in (("num_blocks", MAX_BLOCKS), ("num_host_blocks", MAX_BLOCKS), ("block_size", MAX_TOKENS),
                       ("max_num_seqs", MAX_SEQS), ("max_num_batched_tokens", MAX_TOKENS),
                       ("max_model_len", MAX_TOKENS), ("max_passes", MAX_TOKENS), ("max_chunk", MAX_TOKENS),
                       ("watermark_blocks", MAX_BLOCKS), ("stages", MAX_DEPTH)):
        if getattr(limits, name) > most:
            return f"{name} is {getattr(limits, name)}, more than {most}"
    if len(limits.windows) > MAX_GROUPS or max(limits.windows) > MAX_TOKENS:
        return f"it has {len(limits.windows)} cache groups, of windows up to {max(limits.windows)}"
    if not 0 <= run.depth <= MAX_DEPTH:
        return f"depth is {run.depth}"
    if run.learned is not None and (wrong := _wrong_learned(run.learned)):
        return wrong
    return _wrong_scheduling(run.scheduling)


def _wrong_learned(learned: Learned) -> str:
    for sums in learned.sizes.values():
        numbers = (sums.weight, *sums.products, *sums.totals)
        if not all(0 <= number < MAX_SUM and math.isfinite(number) for number in numbers) or not sums.totals[2] > 0:
            return "its step times are no sums"
    try:
        StepTimeModel(learned)
    except (ValueError, ArithmeticError):
        return "its step times cannot be fitted"
    return ""


def _wrong_scheduling(scheduling: Scheduling) -> str:
    if not 1 <= scheduling.max_num_batched_tokens <= MAX_TOKENS:
        return "its steps have no tokens" if scheduling.max_num_batched_tokens < 1 else "its steps have too many tokens"
    return "" if 1 <= scheduling.max_num_seqs <= MAX_SEQS else f"its slots are {scheduling.max_num_seqs}"
