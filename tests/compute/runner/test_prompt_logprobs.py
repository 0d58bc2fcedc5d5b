"""Entries of prompts, from hidden states, a few rows of logits at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from slotwise.compute.kernels import reference
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.prompt_results import PromptRow, describe, rows_at_a_time, workspace_rows
from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.compute.runner.sampling.gpu_sampler import DeviceSampler
from slotwise.compute.runner.sampling.sampler import Sampling
from slotwise.core.record import TokenLogprobs

VOCAB, HIDDEN = 300, 24


@pytest.fixture(params=["cpu", "device"])
def sampler(request: pytest.FixtureRequest) -> Sampling:
    if request.param == "cpu":
        return Sampler(4, VOCAB)
    return DeviceSampler(SlotTable(4, 64, 16, 3), VOCAB, reference.draw, torch.device("cpu"))


class Head:
    """Counts the rows that are computed at a time."""

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        self.weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)).to(kind)
        self.sizes: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.sizes.append(len(hidden))
        return hidden @ self.weight.T


def prompt_row(row: int, count: int, num_top: int, kind: torch.dtype = torch.float32) -> PromptRow:
    generator = torch.Generator().manual_seed(row)
    hidden = torch.randn(count, HIDDEN, generator=generator).to(kind)
    return PromptRow(row, hidden, torch.randint(VOCAB, (count,), generator=generator), num_top)


def exact(prompt: PromptRow, head: Head) -> list[TokenLogprobs]:
    """By sorting, in float64."""
    found = []
    for logits, token in zip((prompt.hidden @ head.weight.T).float().numpy(), prompt.tokens.tolist(), strict=True):
        logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum())
        order = np.argsort(-logits, kind="stable")[: prompt.num_top]
        rank = 1 + int((logits > logits[token]).sum())
        found.append(TokenLogprobs(logprobs[token], rank, tuple(order.tolist()), tuple(logprobs[order].tolist())))
    return found


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_a_time", [1, 3, 64])
def test_entries_are_those_of_all_logits_at_once(sampler: Sampling, at_a_time: int, kind: torch.dtype) -> None:
    head, rows = Head(kind), [prompt_row(0, 11, 0, kind), prompt_row(3, 4, 5, kind), prompt_row(4, 1, 20, kind)]
    described = describe(rows, head, sampler, at_a_time)
    assert max(head.sizes) <= at_a_time and sum(head.sizes) == 16
    assert [one.row for one in described] == [0, 3, 4]
    for one, prompt in zip(described, rows, strict=True):
        entries = one.read()
        for ours, theirs in zip(entries, exact(prompt, head), strict=True):
            assert ours.rank == theirs.rank and ours.top_ids == theirs.top_ids
            np.testing.assert_allclose([ours.logprob, *ours.top_logprobs], [theirs.logprob, *theirs.top_logprobs],
                                       rtol=1e-5, atol=1e-5)


def test_a_position_without_a_distribution_harms_no_other(sampler: Sampling) -> None:
    prompt = prompt_row(0, 5, 2)
    sound = describe([prompt], Head(), sampler, 2)[0].read()
    prompt.hidden[2] = torch.nan
    entries = describe([prompt], Head(), sampler, 2)[0].read()
    assert math.isnan(entries[2].logprob)
    assert [*entries[:2], *entries[3:]] == [*sound[:2], *sound[3:]]


def test_rows_at_a_time_fit_the_workspace() -> None:
    for num_slots in (1, 16, 40, 64, 1000):
        assert 16 <= rows_at_a_time(num_slots) <= min(64, workspace_rows(num_slots))
        assert workspace_rows(num_slots) >= num_slots
