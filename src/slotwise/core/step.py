"""StepPlan and StepResult: the records exchanged by scheduler and executor.

A plan is data: the executor runs it, the event log stores it, the timeline draws it, the simulator predicts its time.
It holds columns, not row objects: a step of 1,000 rows must cost about a microsecond a row to plan and commit.

    PREFILL   known tokens     |■■■■■■■■■■■■■■■■■■■■■■|       tokens known at admission
              already computed |■■■■■■■■|                     starts[i]
              this step        |        ■■■■■■■■■|            counts[i]; num_logits[i] 0: mid-prompt

    DECODE    known tokens     |■■■■■■■■■■■■■■■■■■■■■■|
              this step        |                     ■dd|     the last token and drafts[i]; num_logits[i] 3
              result           |                      tt|     one draft accepted, and the token after it

Logits are wanted at the last `num_logits[i]` positions of row i: at 1 for the next token, at 1 + drafts to verify
these, at all `counts[i]` for the log-probabilities of a prompt.  A row samples if it wants logits and reaches the end
of the known tokens; its result has 1 to 1 + drafts tokens.  A row of a pooled request wants hidden states there in
place of logits, and samples nothing.

Blocks belong to *cache groups*, sets of layers that keep the same positions; today there is one, group 0.

Static and dynamic batches waste computation, and the plan records it: `padding[i]` tokens beside those of row i, and
rows in `held`, which have their last token already and are computed again until the whole batch has ended.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

from slotwise.core.params import PoolingParams, SamplingParams

CACHE_GROUP = 0  # the only cache group


class RowKind(IntEnum):
    """Whether a row computes tokens known at admission, or tokens sampled since and drafts."""

    PREFILL = 0
    DECODE = 1


class Output(Enum):
    """What a request yields."""

    SAMPLE = "sample"  # tokens
    PROMPT_LOGPROBS = "prompt_logprobs"  # tokens, and the log-probabilities of the prompt's
    POOLED = "pooled"  # one vector, from the hidden states of the prompt


class NewRequest(NamedTuple):
    """A request enters a slot.  `tokens` are all known tokens; after a preemption they include its output."""

    request_id: str
    slot: int
    tokens: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int  # 64 bits; set by the client or drawn on arrival
    stop_ids: tuple[int, ...]  # tokens that end the request; masked until `params.min_tokens` are sampled
    output: Output = Output.SAMPLE
    pooling: PoolingParams | None = None  # of a POOLED request


class NewBlocks(NamedTuple):
    """Blocks appended to a slot's block table of a cache group."""

    slot: int
    group: int
    blocks: tuple[int, ...]


class FreedBlocks(NamedTuple):
    """The last `num_blocks` blocks of a slot's block table leave it: the drafts in them were not accepted."""

    slot: int
    group: int
    num_blocks: int


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
    """One forward pass.  Plans are executed strictly in order of `step`.

    Changes of slots and blocks take effect in the order of these columns, before the forward pass.
    """

    step: int
    now: float  # seconds
    released_slots: tuple[int, ...]  # slots released since the last plan
    new_requests: tuple[NewRequest, ...]
    freed_blocks: tuple[FreedBlocks, ...]
    new_blocks: tuple[NewBlocks, ...]
    request_ids: tuple[str, ...]
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]  # () when no row has any
    num_logits: tuple[int, ...]
    kinds: tuple[RowKind, ...]
    padding: tuple[int, ...]  # () when no row has any
    held: tuple[int, ...]  # indices of rows
    preempted: tuple[Decision, ...]
    refused: tuple[Decision, ...]
    stop: Stop | None
    saves: tuple[Copy, ...] = ()  # device blocks to host blocks, before anything else
    loads: tuple[Copy, ...] = ()  # host blocks to device blocks, before the forward pass
    draft_limit: str = ""  # why there are no more drafts (`core/drafting.py`); "" where none can be

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
    """The output of a step, aligned with the plan's rows.  A row that did not sample has no tokens.

    The tokens of a row with drafts are those it would have sampled without: the accepted drafts, then one more.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # () if no row returns them, else aligned with `tokens`
    failed: tuple[int, ...] = ()  # rows that could not sample; other rows are unaffected
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # () if no row has any; of tokens starts[i] + 1 on
    pooled: tuple[bytes, ...] = ()  # () if no row has any; float32, little-endian, of rows that end a pooled prompt
    forced: tuple[tuple[int, ...], ...] = ()  # () if no row has any; tokens that a grammar forces behind those sampled
    objections: tuple[str, ...] = ()  # why each of `failed` cannot go on, "" for a fault; () if there are only faults

    def check(self, plan: StepPlan) -> None:
        """Raises RuntimeError unless this may be a result of `plan`."""
        if self.step != plan.step or len(self.tokens) != plan.num_rows:
            raise RuntimeError(f"step {plan.step} has {plan.num_rows} rows; the result of step {self.step} has "
                               f"{len(self.tokens)}")
        for drafts, tokens in zip(plan.drafts, self.tokens, strict=False):
            if drafts and tokens[:-1] != drafts[: max(0, len(tokens) - 1)]:
                raise RuntimeError(f"step {plan.step} yields {tokens}, which its drafts {drafts} do not begin")
