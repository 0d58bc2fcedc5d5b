"""A plan is data: the one record the executor obeys, the log stores, the timeline draws and the simulator prices.

Rows are columns, not objects: a step of 1,000 rows must cost about a microsecond a row to plan and commit.
Row i of a step is `(request_ids[i], slots[i], starts[i], counts[i], samples[i])`:

    known tokens     |■■■■■■■■■■■■■■■■■■■■■■|
    already computed |■■■■■■■■|                       starts[i]
    this step        |        ■■■■■■■■■|              counts[i]
    samples[i]: this step reaches the end of the known tokens, so it yields the next one

Batches of whole requests compute for nothing, and a plan says so: `padding[i]` tokens beside row i's own, and the rows
named in `held`, which have their last token already and are computed again until their batch has drained.
"""

from __future__ import annotations

from typing import NamedTuple

from slotwise.core.params import SamplingParams


class NewRequest(NamedTuple):
    """A request takes a slot.  `tokens` are all it is known to have; after a preemption that includes its own."""

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int  # 64 bits; chosen by the client or drawn when the request arrived
    stop_ids: tuple[int, ...]  # tokens that end it, suppressed before `params.min_tokens`


class NewBlocks(NamedTuple):
    """Blocks appended to a slot's block table."""

    slot: int
    blocks: tuple[int, ...]


class Copy(NamedTuple):
    """A block's contents, copied between the device and host memory."""

    source: int
    target: int


class Decision(NamedTuple):
    """A request that was examined and not planned, or lost its place, and why."""

    request_id: str
    reason: str


class Stop(NamedTuple):
    """Where admission ended: everyone from `first_blocked` on waits for `reason`."""

    reason: str
    first_blocked: str
    num_behind: int
    reopens_at: float = float("inf")  # seconds, when the clock alone ends the wait


class StepPlan(NamedTuple):
    """One forward pass.  Executed strictly in order of `step`."""

    step: int
    now: float  # seconds
    released_slots: tuple[int, ...]  # slots given back since the last plan
    new_requests: tuple[NewRequest, ...]
    new_blocks: tuple[NewBlocks, ...]
    request_ids: tuple[str, ...]
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]
    padding: tuple[int, ...]  # () when no row has any
    held: tuple[int, ...]  # indices of rows
    preempted: tuple[Decision, ...]
    refused: tuple[Decision, ...]
    stop: Stop | None
    saves: tuple[Copy, ...] = ()  # from blocks of the device to places of the host, before anything else
    loads: tuple[Copy, ...] = ()  # from places of the host to blocks of the device, before the forward pass

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Computed in this step, padding included."""
        return sum(self.counts) + sum(self.padding)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one sampled position, natural logarithm, after penalties and bias, before truncation."""

    logprob: float  # of the sampled token
    rank: int  # 1: it was the most probable
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class StepResult(NamedTuple):
    """What a step yielded, aligned with the plan's rows: a row that did not sample has no tokens."""

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # () when nobody asked, else aligned with `tokens`
    failed: tuple[int, ...] = ()  # rows that could not sample, through no fault of their neighbours
    complete: tuple[int, ...] = ()  # rows that whoever samples declares to have ended with this token
