"""Log-probabilities of prompts: what the model gives each token of a prompt, after the tokens before it.

They need logits at every position of a prompt: for a prompt of 8,000 tokens and a vocabulary of 128,000 four gigabytes.
So hidden states, which are a hundred times smaller, become logits a few rows at a time, and of each row only the
entries stay.

    positions    0   1   2   3   4        a chunk of 5 tokens of a prompt of 8
    logits       ■ ■ ■ | ■ ■              rows at a time: 3
    describe     1   2   3   4   5        the tokens that follow

The entry of position p + 1 comes from the logits at p: the first token of a prompt has none, and the last position of
the prompt gives the first token of the output, which is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import nan
from typing import NamedTuple

from torch import Tensor

from slotwise.core.step import NewRequest, Output, RowKind, StepPlan, TokenLogprobs
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.sampling.params import Logprobs, Sampling

FEWEST, MOST = 16, 64  # rows of logits at a time: fewer read the head's weights too often, more gain little
UNSOUND = TokenLogprobs(nan, 0, (), ())  # where the logits are no distribution


def rows_at_a_time(num_slots: int) -> int:
    """Rows of logits computed at a time, at most as many as `workspace_rows`."""
    return min(MOST, max(FEWEST, num_slots))


def workspace_rows(num_slots: int) -> int:
    """The most rows of logits that a step holds at a time, of samples or of prompts."""
    return max(num_slots, FEWEST)


class PromptRow(NamedTuple):
    """The part of a step's row whose log-probabilities are wanted."""

    row: int  # of the plan
    hidden: Tensor  # [positions, hidden]
    tokens: Tensor  # [positions] int64, those that follow, on the same device
    num_top: int  # entries of the most probable tokens


class _Asked(NamedTuple):
    """A request whose prompt is to be described."""

    num_prompt: int
    num_at_join: int  # tokens known at admission
    num_top: int


class Prompts:
    """The requests that want log-probabilities of their prompts, by slot.

    Args:
        slots: the token table.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._asked: dict[int, _Asked] = {}

    def join(self, request: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        self._asked.pop(request.slot, None)
        if request.output is Output.PROMPT_LOGPROBS:
            num_top = request.params.prompt_logprobs or 0
            self._asked[request.slot] = _Asked(request.num_prompt, len(request.tokens), num_top)

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._asked.pop(slot, None)

    def are_in(self, plan: StepPlan) -> bool:
        """Whether `plan` wants logits at positions of such prompts."""
        return bool(self._asked) and any(self._of(plan, row) is not None for row in range(plan.num_rows))

    def _of(self, plan: StepPlan, row: int) -> _Asked | None:
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


class Described(NamedTuple):
    """Entries of a row, being copied from the device."""

    row: int  # of the plan
    parts: list[tuple[int, Logprobs]]  # positions of each part, and their entries

    def read(self) -> tuple[TokenLogprobs, ...]:
        """The entries, one for each position.  Call when the device is done with the step."""
        return tuple([entry or UNSOUND for size, part in self.parts for entry in part.read(size)])


def describe(
    prompts: Iterable[PromptRow], logits: Callable[[Tensor], Tensor], sampler: Sampling, at_a_time: int
) -> list[Described]:
    """Compute the entries of all `prompts`, with `at_a_time` rows of logits in memory.

    Args:
        logits: `[rows, hidden] -> [rows, vocab]`.
    """
    described = []
    for prompt in prompts:
        parts = []
        for hidden, tokens in zip(prompt.hidden.split(at_a_time), prompt.tokens.split(at_a_time), strict=True):
            parts.append((len(tokens), sampler.describe(logits(hidden), tokens, prompt.num_top)))
        described.append(Described(prompt.row, parts))
    return described
