"""Results of prompts: log-probabilities of their tokens, and pooled vectors.

A token's log-probability needs the logits at the position before it: for a prompt of 8,000 tokens and a vocabulary of
128,000, four gigabytes.  So hidden states, which are a hundred times smaller, become logits a few rows at a time, and
of each row only the entries stay.

    positions    0   1   2   3   4        a chunk of 5 tokens of a prompt of 8
    logits       ■ ■ ■ | ■ ■              rows at a time: 3
    describe     1   2   3   4   5        the tokens that follow

The entry of position p + 1 comes from the logits at p: the first token of a prompt has none, and the last position of
the prompt gives the first token of the output, which is sampled.

Pooling makes one vector of a prompt's hidden states, which is the request's result:

    positions    0   1   2   3 │ 4   5        a prompt of 6 tokens in two chunks
    `last`                     │     ■        its hidden state
    `mean`       ■   ■   ■   ■ │ ■   ■        their sum, continued from chunk to chunk, divided by 6
    `cls`        ■             │              its hidden state

The vector of an embedding passes the checkpoint's Dense modules; that of a classification, the head of labels.  A
request for `labels` gets log-probabilities of tokens in place of a pooled vector.

Hidden states are those after the last norm, as `transformers` returns them; sums and vectors are float32.  What is
pooled so far is kept for each of the last few chunks: after a failed step the scheduler plans chunks again that were
already added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.sampling.sampler import Logprobs, Sampling
from slotwise.compute.runner.slots import SlotListener
from slotwise.compute.runner.staging import to_host
from slotwise.core.params import (
    CLASSIFY,
    CLS,
    EMBED,
    LABELS,
    MAX,
    MEAN,
    SIGMOID,
    SOFTMAX,
    SQRT_MEAN,
    WEIGHTED_MEAN,
    PoolingSpec,
)
from slotwise.core.record import NewRequest, RowKind, StepPlan, TokenLogprobs
from slotwise.core.request import Output

FEWEST, MOST = 16, 64  # rows of logits at a time: fewer read the head's weights too often, more gain little
UNSOUND = TokenLogprobs(nan, 0, (), ())  # where the logits are not a distribution


def rows_at_a_time(num_slots: int) -> int:
    """Rows of logits computed at a time, at most as many as `workspace_rows`."""
    return min(MOST, max(FEWEST, num_slots))


def workspace_rows(num_slots: int) -> int:
    """The most rows of logits that a step has in memory at a time, of samples or of prompts."""
    return max(num_slots, FEWEST)


class PromptRow(NamedTuple):
    """The part of a step's row whose log-probabilities are wanted."""

    row: int  # of the plan
    hidden: Tensor  # [positions, hidden]
    tokens: Tensor  # [positions] int64, the next token of each, on the same device
    num_top: int  # entries of the most probable tokens


class _PromptRequest(NamedTuple):
    """A request whose prompt is to be described."""

    num_prompt: int
    num_at_join: int  # tokens known at admission
    num_top: int


class PromptLogprobs(SlotListener):
    """The requests that want log-probabilities of their prompts, by slot.

    Args:
        slots: the token table.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._asked: dict[int, _PromptRequest] = {}

    def join(self, request: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        self._asked.pop(request.slot, None)
        if request.spec.output is Output.PROMPT_LOGPROBS:
            num_top = request.spec.params.prompt_logprobs or 0
            self._asked[request.slot] = _PromptRequest(request.num_prompt, len(request.tokens), num_top)

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._asked.pop(slot, None)

    def are_in(self, plan: StepPlan) -> bool:
        """Whether `plan` computes positions of prompts whose log-probabilities were requested."""
        return bool(self._asked) and any(self._of(plan, row) is not None for row in range(plan.num_rows))

    def _of(self, plan: StepPlan, row: int) -> _PromptRequest | None:
        """The request of a row that computes its prompt; None for all other rows."""
        is_prompt = plan.kinds[row] is RowKind.PREFILL and plan.num_logits[row] > 0
        return self._asked.get(plan.slots[row]) if is_prompt else None

    def rows(self, plan: StepPlan, hidden: Tensor) -> list[PromptRow]:
        """The prompts' parts in a step.

        Args:
            hidden: `[positions, hidden]`, of all positions of the plan whose logits are wanted.
        """
        found, end = [], 0
        for row, (slot, start, wanted) in enumerate(zip(plan.slots, plan.starts, plan.num_logits, strict=True)):
            end += wanted
            asked = self._of(plan, row)
            if asked is None or wanted != plan.counts[row]:  # computed again, for its output alone
                continue
            count = min(wanted, asked.num_prompt - 1 - start)
            if count > 0:
                tokens = self._slots.known(slot, start + 1, start + 1 + count)
                found.append(PromptRow(row, hidden[end - wanted : end - wanted + count], tokens, asked.num_top))
        return found

    def num_drawn(self, plan: StepPlan) -> list[int]:
        """Of each row, from how many of the logits it wants tokens are drawn."""
        num_drawn = list(plan.num_logits)
        for row in range(plan.num_rows):
            asked = self._of(plan, row)
            if asked is not None:  # a chunk in the middle of the prompt draws none
                num_drawn[row] = int(plan.starts[row] + plan.counts[row] == asked.num_at_join)
        return num_drawn


class PendingEntries(NamedTuple):
    """Entries of a row, being copied from the device."""

    row: int  # of the plan
    parts: list[tuple[int, Logprobs]]  # positions of each part, and their entries

    def read(self) -> tuple[TokenLogprobs, ...]:
        """The entries, one for each position.  Call when the device is done with the step."""
        return tuple([entry or UNSOUND for size, part in self.parts for entry in part.read(size)])


def describe(
    prompts: Iterable[PromptRow], logits: Callable[[Tensor], Tensor], sampler: Sampling, at_a_time: int
) -> list[PendingEntries]:
    """Compute the entries of all `prompts`, with `at_a_time` rows of logits in memory.

    Args:
        logits: `[rows, hidden] -> [rows, vocab]`.
    """
    described = []
    for prompt in prompts:
        parts = []
        for hidden, tokens in zip(prompt.hidden.split(at_a_time), prompt.tokens.split(at_a_time), strict=True):
            parts.append((len(tokens), sampler.describe(logits(hidden), tokens, prompt.num_top)))
        described.append(PendingEntries(prompt.row, parts))
    return described


MAX_PARTS = 4  # at most two chunks of a request are in flight, so that a failure undoes at most two
SERIAL_NUMBERS = 32_000  # that torch sums on the calling thread
LEAST_LENGTH = 1e-12  # a vector shorter than this is divided by it


class PendingVectors(NamedTuple):
    """Vectors that are being copied from the device."""

    rows: Sequence[int]  # of the plan
    vectors: Tensor  # [rows, numbers] float32

    def read(self) -> dict[int, bytes]:
        """Each vector's bytes; empty if a number is not finite.  Call when the device is done with the step."""
        vectors = self.vectors.numpy().astype("<f4", copy=False)
        are_sound = np.isfinite(vectors).all(axis=1).tolist()
        return {row: vector.tobytes() if is_sound else b""
                for row, vector, is_sound in zip(self.rows, vectors, are_sound, strict=True)}


class _Pool:
    """One pooled request, and what its chunks have given so far."""

    def __init__(self, request: NewRequest, params: PoolingSpec) -> None:
        self.num_prompt = request.num_prompt
        self.params = params
        self._parts: list[tuple[int, Tensor | None]] = [(0, None)]  # of the first so many positions

    def add(self, start: int, hidden: Tensor) -> None:
        """Add the hidden states, `[positions, hidden]`, of the positions from `start` on."""
        while self._parts[-1][0] > start:
            self._parts.pop()
        end, before = self._parts[-1]
        if end != start:
            raise RuntimeError(f"the hidden states before position {start} are not known")
        kind = self.params.pooling_type
        if kind == CLS:
            part = hidden[0].float() if before is None else before
        elif kind == MAX:
            part = hidden.float().amax(0)
            part = part if before is None else torch.maximum(before, part)
        else:
            if kind == WEIGHTED_MEAN:
                weights = torch.arange(start + 1.0, start + len(hidden) + 1.0, device=hidden.device)
                hidden = hidden.float() * weights[:, None]
            part = _sum(hidden)
            part = part if before is None else before + part
        self._parts = [*self._parts[1 - MAX_PARTS :], (start + len(hidden), part)]

    def pooled(self) -> Tensor | None:
        """The pooled hidden states of the whole prompt, `[hidden]` float32; None: that of its last token."""
        part, count = self._parts[-1][1], self.num_prompt
        divisors: dict[str, float] = {
            MEAN: count, SQRT_MEAN: count**0.5, WEIGHTED_MEAN: count * (count + 1) / 2}
        divisor = divisors.get(self.params.pooling_type, 1)
        return part if part is None or divisor == 1 else part / divisor


def _results(params: PoolingSpec, vectors: Tensor) -> Tensor:
    """What clients get of vectors `[rows, numbers]` float32: cut and normalized, or activated.

    Lengths and activations are computed row by row: a result does not depend on the number of rows.
    """
    if params.task == CLASSIFY:
        activate = ACTIVATED.get(params.activation)
        return vectors if activate is None else torch.stack([activate(vector) for vector in vectors])
    vectors = vectors[:, : params.dimensions]
    if not params.normalize:
        return vectors
    lengths = torch.stack([vector.norm() for vector in vectors]).clamp(min=LEAST_LENGTH)
    return vectors / lengths[:, None]


def _sum(hidden: Tensor) -> Tensor:
    """The sum of the rows of `[positions, hidden]`, float32, on one thread: waking others takes longer."""
    rows = max(1, SERIAL_NUMBERS // hidden.shape[1])
    first, *others = [hidden] if len(hidden) <= rows else hidden.split(rows)
    total = first.sum(0, dtype=torch.float32)
    for part in others:
        total += part.sum(0, dtype=torch.float32)
    return total


ACTIVATED: dict[str, Callable[[Tensor], Tensor]] = {
    SIGMOID: torch.sigmoid, SOFTMAX: lambda numbers: numbers.softmax(-1)}


class PoolingHeads(Protocol):
    """What a model makes of pooled hidden states, all `[rows, ...]` in the model's own type."""

    def embedded(self, pooled: Tensor) -> Tensor:
        """Vectors, from `[rows, hidden]`."""
        ...

    def classified(self, pooled: Tensor) -> Tensor:
        """The numbers of labels, from `[rows, hidden]`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden] -> [rows, vocab]`."""
        ...


class PooledPrompts(SlotListener):
    """The pooled requests, by slot."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def join(self, request: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        self._pools.pop(request.slot, None)
        if request.spec.pooling is not None:
            self._pools[request.slot] = _Pool(request, request.spec.pooling)

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._pools.pop(slot, None)

    def are_in(self, plan: StepPlan) -> bool:
        """Whether `plan` has a row of a pooled request."""
        return bool(self._pools) and any(slot in self._pools for slot in plan.slots)

    def narrowed(self, plan: StepPlan) -> tuple[StepPlan, list[int]] | None:
        """The plan as far as hidden states are pooled: of `cls`, only that of a prompt's first token is needed.

        Returns its `num_logits`, and which of the positions it wanted are left; None: all of them.
        """
        counts, left, at = list(plan.num_logits), list[int](), 0
        for row, (slot, wanted) in enumerate(zip(plan.slots, plan.num_logits, strict=True)):
            pool = self._pools.get(slot)
            if pool is not None and pool.params.pooling_type == CLS and plan.kinds[row] is not RowKind.DECODE:
                counts[row] = int(plan.starts[row] == 0 and wanted > 0)
            left += range(at, at + counts[row])
            at += wanted
        return None if len(left) == at else (plan._replace(num_logits=tuple(counts)), left)

    def add(self, plan: StepPlan, hidden: Tensor, heads: PoolingHeads, at_a_time: int) -> list[PendingVectors]:
        """Add a step's hidden states; returns the vectors of the prompts that it completes.

        Args:
            hidden: `[positions, hidden]`, of all positions of the plan where logits or hidden states are wanted.
            at_a_time: rows of logits in memory.
        """
        complete: dict[PoolingSpec, list[tuple[int, Tensor]]] = {}
        end = 0
        for row, (slot, wanted) in enumerate(zip(plan.slots, plan.num_logits, strict=True)):
            end += wanted
            pool = self._pools.get(slot)
            if pool is None or plan.kinds[row] is RowKind.DECODE:  # held: computed for nothing
                continue
            if pool.params.reads_all and wanted:
                pool.add(plan.starts[row], hidden[end - wanted : end])
            if plan.starts[row] + plan.counts[row] == pool.num_prompt:
                vector = pool.pooled()
                complete.setdefault(pool.params, []).append((row, hidden[end - 1] if vector is None else vector))
        found = []
        for params, some in complete.items():
            rows, vectors = [row for row, _ in some], [vector for _, vector in some]
            if params.task == LABELS:
                found += [PendingVectors(rows[first : first + at_a_time], to_host(torch.stack([
                    _label_logprobs(one, params.label_ids)
                    for one in heads.logits(torch.stack(vectors[first : first + at_a_time]))])))
                    for first in range(0, len(rows), at_a_time)]
                continue
            compute = heads.embedded if params.task == EMBED else heads.classified
            computed = compute(torch.stack(vectors).to(hidden.dtype)).float()
            found.append(PendingVectors(rows, to_host(_results(params, computed))))
        return found

    def holds(self, slot: int) -> bool:
        """Whether the slot's request is pooled: none of its rows samples."""
        return slot in self._pools


def _label_logprobs(logits: Tensor, label_ids: tuple[int, ...]) -> Tensor:
    """Log-probabilities of some tokens among all, and the largest of all, `[labels + 1]` float32, from `[vocab]`.

    A rank that has the logits of a part of the vocabulary returns zeros, which are not read.
    """
    if max(label_ids) >= len(logits):
        return logits.new_zeros(len(label_ids) + 1, dtype=torch.float32)
    logprobs = logits.float().log_softmax(-1)
    return torch.cat((logprobs[list(label_ids)], logprobs.max()[None]))
