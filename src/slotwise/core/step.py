"""StepPlan and StepResult: the records exchanged by scheduler and executor.

A plan is data: the executor runs it, the event log stores it, the timeline draws it, the simulator predicts its time.
It holds columns, not row objects: a step of 1,000 rows must cost about a microsecond a row to plan and commit.
Row i of a step is `(request_ids[i], slots[i], starts[i], counts[i], samples[i])`:

    known tokens     |■■■■■■■■■■■■■■■■■■■■■■|
    already computed |■■■■■■■■|                       starts[i]
    this step        |        ■■■■■■■■■|              counts[i]
    samples[i]: this step reaches the end of the known tokens, so it samples the next one

Static and dynamic batches waste computation, and the plan records it: `padding[i]` tokens beside those of row i, and
rows in `held`, which have their last token already and are computed again until the whole batch has ended.
"""

from __future__ import annotations

from typing import NamedTuple

from slotwise.core.params import SamplingParams


class NewRequest(NamedTuple):
    """A request enters a slot.  `tokens` are all known tokens; after a preemption they include its output."""

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int  # 64 bits; set by the client or drawn on arrival
    stop_ids: tuple[int, ...]  # tokens that end the request; masked before `params.min_tokens`


class NewBlocks(NamedTuple):
    """Blocks appended to a slot's block table."""

    slot: int
    blocks: tuple[int, ...]


class Copy(NamedTuple):
    """One block copied between device and host memory."""

    source: int
    target: int


class Decision(NamedTuple):
    """A request that was not planned, or was preempted, and the reason (`core/reasons.py`)."""

    request_id: str
    reason: str


class Stop(NamedTuple):
    """Where admission stopped: `first_blocked` waits for `reason`, and `num_behind` requests wait behind it."""

    reason: str
    first_blocked: str
    num_behind: int
    reopens_at: float = float("inf")  # seconds; when time alone ends the wait


class StepPlan(NamedTuple):
    """One forward pass.  Plans are executed strictly in order of `step`."""

    step: int
    now: float  # seconds
    released_slots: tuple[int, ...]  # slots released since the last plan
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
    saves: tuple[Copy, ...] = ()  # device blocks to host blocks, before anything else
    loads: tuple[Copy, ...] = ()  # host blocks to device blocks, before the forward pass

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, padding included."""
        return sum(self.counts) + sum(self.padding)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one sampled position: natural logarithm, after penalties and bias, before truncation."""

    logprob: float  # of the sampled token
    rank: int  # 1: the most probable token
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class StepResult(NamedTuple):
    """The output of a step, aligned with the plan's rows.  A row that did not sample has no tokens."""

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # () if no row returns them, else aligned with `tokens`
    failed: tuple[int, ...] = ()  # rows that could not sample; other rows are unaffected
    complete: tuple[int, ...] = ()  # rows that the sampler declares ended with this token
