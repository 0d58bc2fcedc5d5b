"""Mixtures of experts on the CPU, against the contract in plain torch."""

from __future__ import annotations

import product_paths
import pytest
import torch
from kernels.mixtures import CLAMPED, numbers, weights
from kernels.paged import distance

from slotwise.kernels.cpu import paths
from slotwise.kernels.cpu.kernels import CpuKernels
from slotwise.kernels.interface import Kernels, Mixture, Routing
from slotwise.kernels.reference import ReferenceKernels, route

REFERENCE = ReferenceKernels()
HIDDEN, INNER = 96, 64
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def mixture(
    kernels: Kernels, kind: torch.dtype, routing: Routing, activation="silu", *, with_bias=False, ends=None,
) -> Mixture:
    ends = torch.zeros(routing.num_experts, dtype=torch.int64) if ends is None else ends
    packed = weights(kind, routing.num_experts, HIDDEN, INNER, with_bias=with_bias)
    return kernels.experts(packed, routing, activation, ends)


@pytest.mark.parametrize("is_normalised", [True, False])
def test_the_contract_is_the_formula(is_normalised):
    routing = Routing(5, 2, is_normalised)
    x, logits = numbers(torch.float32, 7, HIDDEN), numbers(torch.float32, 7, 5)
    actual = mixture(REFERENCE, torch.float32, routing)(x, logits)
    experts = weights(torch.float32, 5, HIDDEN, INNER)
    for token in range(7):
        shares = logits[token].softmax(0)
        best = shares.topk(2)
        total = best.values.sum() if is_normalised else 1.0
        expected = torch.zeros(HIDDEN)
        for share, expert in zip(best.values, best.indices.tolist(), strict=True):
            gate, up = (experts[expert].gate_up @ x[token]).chunk(2)
            expected += share / total * (experts[expert].down @ (torch.nn.functional.silu(gate) * up))
        assert distance(actual[token], expected) < 1e-5


@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize(("routing", "activation", "with_bias"), [
    (Routing(8, 2, True), "silu", False), (Routing(60, 4, False), "silu", False), (Routing(4, 4, True), CLAMPED, True),
    (Routing(3, 1, False), "gelu_tanh", True), (Routing(1, 1, True), "silu", False)])
def test_float32(tokens, routing, activation, with_bias):
    x, logits = numbers(torch.float32, tokens, HIDDEN), numbers(torch.float32, tokens, routing.num_experts)
    ours, theirs = (mixture(kernels, torch.float32, routing, activation, with_bias=with_bias)(x, logits)
                    for kernels in (CpuKernels(2), REFERENCE))
    assert distance(ours, theirs) < CLOSE[torch.float32]


@product_paths.each(paths.DENSE)
@pytest.mark.parametrize("activation", ["silu", CLAMPED])
def test_bfloat16_on_each_path(path, activation):
    routing = Routing(8, 3, True)
    x, logits = numbers(torch.bfloat16, 50, HIDDEN), numbers(torch.bfloat16, 50, 8)
    ours, theirs = (mixture(kernels, torch.bfloat16, routing, activation, with_bias=True)(x, logits)
                    for kernels in (CpuKernels(2, path=path), REFERENCE))
    assert distance(ours, theirs) < CLOSE[torch.bfloat16]


@product_paths.each(paths.QUANTISED)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantised(path, bits):
    routing = Routing(8, 3, True)
    x, logits = numbers(torch.float32, 50, HIDDEN), numbers(torch.float32, 50, 8)
    ours, theirs = (mixture(kernels, torch.float32, routing)(x, logits)
                    for kernels in (CpuKernels(2, bits, path=path), REFERENCE))
    assert distance(ours, theirs) < {"int8": 0.05, "int4": 0.3}[bits]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_token_does_not_depend_on_the_tokens_beside_it(threads):
    routing = Routing(8, 2, True)
    kernels = CpuKernels(threads)
    for kind in (torch.float32, torch.bfloat16):
        packed = mixture(kernels, kind, routing)
        x, logits = numbers(kind, 70, HIDDEN), numbers(kind, 70, 8)
        together = packed(x, logits)
        assert all(torch.equal(packed(x[i : i + 1], logits[i : i + 1])[0], together[i]) for i in range(70))
        assert torch.equal(packed(x[11:40], logits[11:40]), together[11:40])


def test_equal_logits_choose_the_first_experts_and_weights_of_others_are_not_read():
    """What is not read may be anything: NaN here."""
    kind, routing = torch.float32, Routing(6, 2, True)
    experts = weights(kind, 6, HIDDEN, INNER)
    for each in experts[2:]:
        each.gate_up.fill_(float("nan"))
    x = numbers(kind, 5, HIDDEN)
    chosen, shares = route(torch.zeros(5, 6), routing)
    assert chosen.tolist() == [[0, 1]] * 5 and (shares == 0.5).all()
    for kernels in (CpuKernels(2), REFERENCE):
        ends = torch.zeros(6, dtype=torch.int64)
        assert kernels.experts(experts, routing, "silu", ends)(x, torch.zeros(5, 6)).isfinite().all()


@pytest.mark.parametrize("logits", [[-1.0, 2.0, -3.0, 0.5], [-5.0, -4.0, -6.0, -4.5], [float("-inf"), 1.0, 0.0, 2.0]])
def test_the_order_of_negative_and_infinite_logits(logits):
    kind, routing = torch.float32, Routing(4, 2, False)
    x, scores = numbers(kind, 1, HIDDEN), torch.tensor([logits])
    ours, theirs = (mixture(kernels, kind, routing)(x, scores) for kernels in (CpuKernels(2), REFERENCE))
    assert distance(ours, theirs) < CLOSE[kind]


def test_a_token_that_is_not_a_number_stays_one_and_disturbs_no_other():
    kind, routing = torch.float32, Routing(8, 2, True)
    packed = mixture(CpuKernels(2), kind, routing)
    x, logits = numbers(kind, 9, HIDDEN), numbers(kind, 9, 8)
    expected = packed(x, logits)
    x[4], logits[4] = float("nan"), float("nan")
    actual = packed(x, logits)
    assert actual[4].isnan().all()
    assert torch.equal(actual[:4], expected[:4]) and torch.equal(actual[5:], expected[5:])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("kind", "quantization"), [(torch.float32, "none"), (torch.bfloat16, "none"),
                                                    (torch.bfloat16, "int8")])
def test_a_recorded_mixture_follows_the_tokens(kind, quantization, threads):
    """Which experts are read changes from run to run, and nothing in Python does."""
    kernels, routing = CpuKernels(threads, quantization, path=None), Routing(16, 4, True)
    if kernels.product_path(kind) == "onednn":
        pytest.skip("what torch computes is not recorded")
    packed = mixture(kernels, kind, routing, CLAMPED, with_bias=True)
    for tokens in (1, 5, 33):
        x, logits = torch.zeros(tokens, HIDDEN, dtype=kind), torch.zeros(tokens, 16, dtype=kind)
        graph = kernels.record(lambda x=x, logits=logits: packed(x, logits))
        for seed in range(4):
            x.copy_(numbers(kind, tokens, HIDDEN, seed=seed))
            logits.copy_(numbers(kind, tokens, 16, seed=seed) * 3)
            expected = packed(x, logits).clone()
            assert torch.equal(graph.run(), expected)


def test_tokens_of_each_expert_are_counted_over_all_steps():
    """Also by runs of a recorded step, whose recording counts as one."""
    routing, x = Routing(16, 3, True), numbers(torch.float32, 40, HIDDEN)
    graph_logits, ends = numbers(torch.float32, 7, 16, seed=9), torch.zeros(16, dtype=torch.int64)
    kernels = CpuKernels(2)
    packed = mixture(kernels, torch.float32, routing, ends=ends)
    graph = kernels.record(lambda: packed(x[:7], graph_logits))
    seen = [graph_logits.clone()]
    for seed, tokens in enumerate((1, 40, 5)):
        graph_logits.copy_(numbers(torch.float32, 7, 16, seed=20 + seed))
        graph.run()
        logits = numbers(torch.float32, tokens, 16, seed=seed)
        packed(x[:tokens], logits)
        seen += [graph_logits.clone(), logits]
    chosen = route(torch.cat(seen), routing)[0]
    assert ends.diff(prepend=ends.new_zeros(1)).tolist() == chosen.flatten().bincount(minlength=16).tolist()
    theirs = torch.zeros(16, dtype=torch.int64)
    mixture(REFERENCE, torch.float32, routing, ends=theirs)(x.repeat(2, 1)[: len(chosen)], torch.cat(seen))
    assert torch.equal(theirs, ends)


def test_no_tokens():
    ends = torch.zeros(4, dtype=torch.int64)
    packed = mixture(CpuKernels(2), torch.float32, Routing(4, 2, True), ends=ends)
    assert packed(torch.empty(0, HIDDEN), torch.empty(0, 4)).shape == (0, HIDDEN) and not ends.any()
