"""Mixtures of experts, all in one launch, against the contract in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_device import DEVICE, EXAMPLES, KERNELS, interpreted, thinned
from support.cuda_ragged import REFERENCE
from support.mixtures import CLAMPED, ROUTINGS, numbers, weights
from support.paged import distance
from support.quantized_matrices import FORMATS, depth_of, random_matrix

from slotwise.compute.kernels.interface import ExpertWeights, Routing
from slotwise.compute.kernels.matrix import Factors, StackedMatrix
from slotwise.compute.kernels.reference import route

with interpreted():
    from slotwise.compute.kernels.cuda import experts

HIDDEN, INNER = 48, 40  # neither is a multiple of a tile
CLOSE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 4e-2}


def there(each: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(weight.to(DEVICE) if isinstance(weight, torch.Tensor) else weight for weight in each))


def no_ends(routing: Routing, device: str = DEVICE) -> torch.Tensor:
    return torch.zeros(routing.num_experts, dtype=torch.int64, device=device)


def both(packed: list[ExpertWeights], x, logits, routing, activation="silu"):
    """The results, whose counts of tokens by expert are the same."""
    ends, counted = no_ends(routing), no_ends(routing, "cpu")
    mixture = KERNELS.experts(map(there, packed), routing, activation, ends)
    ours = mixture(x.to(DEVICE), logits.to(DEVICE)).cpu()
    theirs = REFERENCE.experts(packed, routing, activation, counted)(x, logits)
    assert torch.equal(ends.cpu(), counted) and counted[-1] == len(x) * routing.top_k
    return ours, theirs


SHAPES = [
    (1, Routing(8, 2, True), "silu", False), (40, Routing(3, 2, False), CLAMPED, True),
    (140, Routing(4, 2, True), "gelu_tanh", False), (5, Routing(33, 4, False), "silu", True),
    (3, Routing(1, 1, True), "silu", False)]
KINDS = list(CLOSE)


@pytest.mark.parametrize(("kind", "tokens", "routing", "activation", "with_bias"), [
    *((torch.float32, *shape) for shape in SHAPES),
    *((kind, *shape) for place, shape in enumerate(SHAPES) for kind in KINDS[1:]
      if DEVICE == "cuda" or (place in (1, 2) and kind == KINDS[place]))])
def test_the_contract(kind, tokens, routing, activation, with_bias):
    """By small and large tiles, with experts that no token chose."""
    x, logits = numbers(kind, tokens, HIDDEN), numbers(kind, tokens, routing.num_experts)
    packed = weights(kind, routing.num_experts, HIDDEN, INNER, with_bias=with_bias)
    ours, theirs = both(packed, x, logits, routing, activation)
    assert distance(ours, theirs) < CLOSE[kind]


def packed_experts(name: str, count: int, *, is_ordered: bool = False, with_bias: bool = False) -> list[ExpertWeights]:
    """Each with numbers, and an order of its inputs, of its own."""
    hidden, inner = (depth_of(FORMATS[name], least) for least in (HIDDEN, INNER))
    biases = [each[2:] for each in weights(torch.float32, count, hidden, inner, with_bias=with_bias)]
    return [ExpertWeights(*(random_matrix(FORMATS[name], *size, seed=2 * expert + place, is_ordered=is_ordered)
                            for place, size in enumerate(((2 * inner, hidden), (hidden, inner)))), *own)
            for expert, own in enumerate(biases)]


@pytest.mark.parametrize(("name", "tokens", "with_bias", "is_ordered"), [
    *thinned(("Q4_K", 3, True, False), ("Q6_K", 3, False, False), few=1),  # Q6_K beside Q4_K: below
    ("Q8_0", 40, False, False), ("MXFP4", 60, True, False), ("AWQ", 5, False, False), ("GPTQ", 5, False, True),
    ("GPTQ", 60, True, True), ("NF4", 5, False, False), ("FP8", 5, False, False)])
def test_packed_weights(name, tokens, with_bias, is_ordered):
    routing = Routing(3, 2, True)
    packed = packed_experts(name, 3, is_ordered=is_ordered, with_bias=with_bias)
    x, logits = numbers(torch.float32, tokens, packed[0].gate_up.depth), numbers(torch.float32, tokens, 3)
    ours, theirs = both(packed, x, logits, routing, CLAMPED)
    assert distance(ours, theirs) < 3 * CLOSE[torch.float32]


@pytest.mark.parametrize("kind", CLOSE, ids=str)
def test_packed_weights_in_all_types(kind):
    routing, packed = Routing(5, 2, True), packed_experts("Q8_0", 5)
    ours, theirs = both(packed, numbers(kind, 4, HIDDEN), numbers(kind, 4, 5), routing)
    assert ours.dtype == kind and distance(ours, theirs) < CLOSE[kind]


@pytest.mark.parametrize("tokens", thinned(2, 60, few=1))
def test_formats_side_by_side(tokens):
    """Gates and what they gate in two formats, beside plain numbers for the rest."""
    routing, plain = Routing(3, 1, True), weights(torch.float32, 3, 256, INNER, with_bias=True)
    mixed = [each._replace(gate_up=StackedMatrix(tuple(random_matrix(FORMATS[name], INNER, 256, seed=place)
                                                       for name in ("Q4_K", "Q6_K"))))
             for place, each in enumerate(plain)]
    ours, theirs = both(mixed, numbers(torch.float32, tokens, 256), numbers(torch.float32, tokens, 3), routing)
    assert distance(ours, theirs) < CLOSE[torch.float32]


def test_codes_of_experts_that_no_token_chose_are_not_read():
    routing, packed = Routing(6, 2, True), packed_experts("Q8_0", 6)
    for place, each in enumerate(packed[2:], 2):
        def unsound(first, end, read=each.gate_up.read):
            rows = read(first, end)
            return rows._replace(scales=Factors(rows.scales.values * float("nan")))

        packed[place] = each._replace(gate_up=replace(each.gate_up, read=unsound))
    ours, theirs = both(packed, numbers(torch.float32, 5, packed[0].gate_up.depth), torch.zeros(5, 6), routing)
    assert ours.isfinite().all() and distance(ours, theirs) < CLOSE[torch.float32]


@settings(max_examples=3 * EXAMPLES, deadline=None)
@given(st.integers(1, 90), st.sampled_from([(1, 1), (5, 2), (8, 8), (60, 6)]), st.booleans(), st.integers(0, 2))
def test_pairs_lie_in_the_order_of_their_experts(tokens, sizes, is_normalized, levels):
    """Few different logits: of equal ones the first comes first."""
    routing = Routing(*sizes, is_normalized)
    logits = torch.randint(-levels, levels + 1, (tokens, routing.num_experts)).float()
    found, shares = experts.route(logits.to(DEVICE), routing)
    pairs, starts = (tensor.cpu() for tensor in experts.in_order(found, routing.num_experts))
    chosen, expected = route(logits, routing)
    of_pairs = chosen.flatten()
    assert torch.equal(pairs.long(), of_pairs.argsort(stable=True))
    assert torch.equal(starts.long(), torch.searchsorted(of_pairs.sort().values, torch.arange(len(starts))))
    assert distance(shares.cpu(), expected.flatten()) < 1e-6


@pytest.mark.parametrize("name", ROUTINGS)
def test_shares_that_are_not_the_softmax_of_logits(name):
    routing, packed = ROUTINGS[name], weights(torch.float32, ROUTINGS[name].num_experts, HIDDEN, INNER)
    if routing.correction is not None:
        routing = replace(routing, correction=routing.correction.to(DEVICE))
    logits = numbers(torch.float32, 12, routing.num_experts)
    found, shares = experts.route(logits.to(DEVICE), routing)
    chosen, expected = route(logits, ROUTINGS[name])
    assert torch.equal(found.cpu().long(), chosen.flatten()) and distance(shares.cpu(), expected.flatten()) < 1e-5
    if DEVICE == "cpu" and name not in ("DeepSeek-V3", "Llama 4"):
        return  # shares are all that the others give to the mixture
    x, ends = numbers(torch.float32, 12, HIDDEN), no_ends(routing)
    ours = KERNELS.experts(map(there, packed), routing, "silu", ends)(x.to(DEVICE), logits.to(DEVICE)).cpu()
    theirs = REFERENCE.experts(packed, ROUTINGS[name], "silu", no_ends(routing, "cpu"))(x, logits)
    assert distance(ours, theirs) < CLOSE[torch.float32] * routing.scale


def test_weights_of_experts_that_no_token_chose_are_not_read():
    routing, packed = Routing(6, 2, True), weights(torch.float32, 6, HIDDEN, INNER)
    for each in packed[2:]:
        each.gate_up.fill_(float("nan"))
    ours, theirs = both(packed, numbers(torch.float32, 5, HIDDEN), torch.zeros(5, 6), routing)
    assert ours.isfinite().all() and distance(ours, theirs) < CLOSE[torch.float32]


@pytest.mark.parametrize(("is_normalized", "unsound"), thinned(
    (True, "x"), (False, "one logit"), (True, "logits"), (False, "x"), (False, "logits"), (True, "one logit"), few=2))
def test_a_token_that_is_not_a_number_stays_one_and_disturbs_no_other(unsound, is_normalized):
    routing, packed = Routing(8, 2, is_normalized), weights(torch.float32, 8, HIDDEN, INNER)
    x, logits = numbers(torch.float32, 9, HIDDEN), numbers(torch.float32, 9, 8)
    expected, _ = both(packed, x, logits, routing)
    if unsound == "x":
        x[4] = float("nan")
    else:
        logits[4, 3 : 4 if unsound == "one logit" else 8] = float("nan")
    mixture = KERNELS.experts(map(there, packed), routing, "silu", no_ends(routing))
    actual = mixture(x.to(DEVICE), logits.to(DEVICE)).cpu()
    assert actual[4].isnan().all()
    assert torch.equal(actual[:4], expected[:4]) and torch.equal(actual[5:], expected[5:])


@pytest.mark.parametrize("logits", [[-1.0, 2.0, -3.0, 0.5], [-5.0, -4.0, -6.0, -4.5], [float("-inf"), 1.0, 0.0, 2.0]])
def test_negative_and_infinite_logits(logits):
    routing = Routing(4, 2, False)
    packed, x = weights(torch.float32, 4, HIDDEN, INNER), numbers(torch.float32, 1, HIDDEN)
    ours, theirs = both(packed, x, torch.tensor([logits]), routing)
    assert distance(ours, theirs) < CLOSE[torch.float32]


def test_ranks_that_hold_some_experts_add_up_to_all():
    routing, packed = Routing(6, 2, True), weights(torch.float32, 6, HIDDEN, INNER, with_bias=True)
    x, logits = numbers(torch.float32, 20, HIDDEN), numbers(torch.float32, 20, 6)
    whole, _ = both(packed, x, logits, routing)
    parts = [both(packed[held.start : held.stop], x, logits, replace(routing, held=held))
             for held in (range(1), range(1, 4), range(4, 6))]
    assert all(distance(ours, theirs) < CLOSE[torch.float32] for ours, theirs in parts)
    assert distance(sum(ours for ours, _ in parts), whole) < 1e-5


def test_no_tokens():
    routing = Routing(4, 2, True)
    ends = no_ends(routing)
    mixture = KERNELS.experts(map(there, weights(torch.float32, 4, HIDDEN, INNER)), routing, "silu", ends)
    assert mixture(torch.empty(0, HIDDEN, device=DEVICE), torch.empty(0, 4, device=DEVICE)).shape == (0, HIDDEN)
    assert not ends.any()
