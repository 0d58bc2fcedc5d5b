"""Drawing tokens, against plain torch, which is held against the CPU's sampler elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_device import DEVICE, EXAMPLES, geometry, interpreted
from torch import Tensor

from slotwise.compute.kernels import reference

with interpreted():
    from slotwise.compute.kernels.cuda import sampling

GREEDY, PLAIN = (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0)

controls = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.sampled_from([0, 1, 2, 40, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]), st.sampled_from([0.0, 0.001, 0.2, 1.0]))


def sample(logits: Tensor, asked: list[tuple], seeds: list[int], indices: list[int]) -> list[int]:
    arguments = (torch.tensor(asked, dtype=torch.float32), torch.tensor(seeds), torch.tensor(indices))
    return sampling.sample(logits.to(DEVICE), *(tensor.to(DEVICE) for tensor in arguments)).tolist()


def expected(logits: Tensor, asked: list[tuple], seeds: list[int], indices: list[int]) -> list[int]:
    return reference.draw(
        logits, torch.tensor(asked, dtype=torch.float32), torch.tensor(seeds), torch.tensor(indices)).tolist()


def random(rows: int, vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@settings(max_examples=8 * EXAMPLES, deadline=None)
@given(
    st.lists(st.tuples(controls, st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=2),
    geometry(st.sampled_from([1, 5, 300, 4096, 4097, 9000]), 1, 4097, 9000), st.sampled_from([0.1, 3.0, 20.0]),
    geometry(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), torch.float32, torch.bfloat16),
    st.integers(0, 1000))
def test_the_same_token_as_elsewhere(rows, vocab, spread, kind, seed):
    logits = random(len(rows), vocab, seed, spread).to(kind)
    asked = [list(column) for column in zip(*rows, strict=True)]
    assert sample(logits, *asked) == expected(logits, *asked)


def test_every_kind_of_draw():
    asked = [PLAIN, (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 20, 0.9, 0.01), (1.0, 0, 1.0, 0.2)]
    logits, count = random(1, 200, 7).repeat(len(asked), 1), list(range(len(asked)))
    indices = [7 - number for number in count]
    tokens = sample(logits, asked, count, indices)
    assert tokens == expected(logits, asked, count, indices)
    assert len(set(tokens)) > 1, "draws that say too little"


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.zeros(3, 5000)
    logits[0, [17, 4500]] = 2
    logits[1, 4999] = 1
    assert sample(logits, [GREEDY] * 3, [1, 2, 3], [0, 0, 0]) == [17, 4999, 0]


def test_ties_stand_or_fall_together():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0]])
    tokens = sample(logits.repeat(6, 1), [(1.0, 2, 1.0, 0.0)] * 6, list(range(6)), [0] * 6)
    assert set(tokens) == {1, 2, 3}


@pytest.mark.parametrize("asked", [GREEDY, (1.0, 3, 0.9, 0.1)])
def test_rows_without_a_sound_distribution_fail_alone(asked):
    logits = random(5, 4200, 3)
    logits[0, 4100], logits[1, 3], logits[2], logits[3, 50:] = float("nan"), float("inf"), -float("inf"), -float("inf")
    tokens = sample(logits, [asked] * 5, [1] * 5, [1] * 5)
    assert tokens == expected(logits, [asked] * 5, [1] * 5, [1] * 5)
    assert tokens[:3] == [sampling.FAILED] * 3
    assert 0 <= tokens[3] < 50
    assert tokens[4] >= 0


def test_a_row_does_not_feel_its_batch_mates():
    logits, asked = random(3, 700, 5), [PLAIN, (0.8, 50, 0.9, 0.0), GREEDY]
    together = sample(logits, asked, [4, 5, 6], [7, 8, 9])
    alone = [sample(logits[i : i + 1], asked[i : i + 1], [4 + i], [7 + i])[0] for i in range(3)]
    assert alone == together


def test_logits_may_be_rows_of_something_wider():
    wide = random(2, 600, 9)
    assert sample(wide[:, :500], [PLAIN] * 2, [1, 2], [0, 0]) == sample(
        wide[:, :500].contiguous(), [PLAIN] * 2, [1, 2], [0, 0])


def test_no_rows():
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    logits, asked = torch.empty(0, 50, device=DEVICE), torch.empty(0, 4, device=DEVICE)
    assert not len(sampling.sample(logits, asked, nothing, nothing))
