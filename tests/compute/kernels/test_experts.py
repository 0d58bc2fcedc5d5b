"""Mixtures of experts on the CPU, against the contract in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import product_paths
from support.mixtures import CLAMPED, ROUTINGS, numbers, weights
from support.paged import distance
from support.quantized_matrices import random_matrix
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import paths
from slotwise.compute.kernels.interface import (
    ExpertGroups,
    ExpertWeights,
    Kernels,
    Mixture,
    PlainActivation,
    Routing,
)
from slotwise.compute.kernels.matrix import E4M3, Format, QuantizedMatrix, Rows, Weight, stacked
from slotwise.compute.kernels.reference import ReferenceKernels, route
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES

REFERENCE = ReferenceKernels()
HIDDEN, INNER = 96, 64
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
WIDE = 256  # as many numbers as a K-quant's block
FORMATS = {name: (BLOCK_TYPES[name].format,) for name in ("Q4_K", "Q6_K", "Q8_0", "MXFP4")} | {
    "4 bits in another order": (Format(4, 64, torch.float16, has_minimums=True),),
    "8-bit floats": (Format(8, 128, torch.float32, levels=E4M3),),
    "gates in another format": (BLOCK_TYPES["Q4_K"].format, BLOCK_TYPES["Q6_K"].format)}
"""Of gates and what they gate; of down products the first."""


def no_ends(experts: int) -> Tensor:
    return torch.zeros(experts, dtype=torch.int64)


def mixture(
    kernels: Kernels, kind: torch.dtype, routing: Routing, activation="silu", *, with_bias=False, ends=None,
) -> Mixture:
    ends = no_ends(routing.num_experts) if ends is None else ends
    packed = weights(kind, routing.num_experts, HIDDEN, INNER, with_bias=with_bias)
    return kernels.experts(packed, routing, activation, ends)


@pytest.mark.parametrize("kernels", [REFERENCE, CpuKernels(2)], ids=["reference", "cpu"])
def test_ranks_that_hold_some_experts_add_up_to_all(kernels):
    """Also one that holds a single expert; a result of an expert elsewhere, whatever lies in its place, is left out."""
    routing, packed = Routing(7, 3, True), weights(torch.float32, 7, HIDDEN, INNER, with_bias=True)
    x, logits = numbers(torch.float32, 9, HIDDEN), numbers(torch.float32, 9, 7)
    counts = [no_ends(7) for _ in range(4)]
    whole = kernels.experts(packed, routing, CLAMPED, counts[0])(x, logits)
    parts = [kernels.experts(packed[held.start : held.stop], replace(routing, held=held), CLAMPED, ends)(x, logits)
             for held, ends in zip((range(4), range(4, 5), range(5, 7)), counts[1:], strict=True)]
    assert distance(sum(parts), whole) < 1e-5 and all(distance(part, whole) > 0.1 for part in parts)
    assert all(torch.equal(counts[0], ends) for ends in counts[1:])


@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_contract_is_the_formula(is_normalized):
    routing = Routing(5, 2, is_normalized)
    x, logits = numbers(torch.float32, 7, HIDDEN), numbers(torch.float32, 7, 5)
    actual = mixture(REFERENCE, torch.float32, routing)(x, logits)
    experts = weights(torch.float32, 5, HIDDEN, INNER)
    for token in range(7):
        shares = logits[token].softmax(0)
        best = shares.topk(2)
        total = best.values.sum() if is_normalized else 1.0
        expected = torch.zeros(HIDDEN)
        for share, expert in zip(best.values, best.indices.tolist(), strict=True):
            gate, up = (experts[expert].gate_up @ x[token]).chunk(2)
            expected += share / total * (experts[expert].down @ (torch.nn.functional.silu(gate) * up))
        assert distance(actual[token], expected) < 1e-5


@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize(("routing", "activation", "with_bias"), [
    (Routing(8, 2, True), "silu", False), (Routing(60, 4, False), "silu", False), (Routing(4, 4, True), CLAMPED, True),
    (Routing(3, 1, False), "gelu_tanh", True), (Routing(1, 1, True), "silu", False),
    *((routing, "silu", False) for routing in ROUTINGS.values())])
def test_float32(tokens, routing, activation, with_bias):
    x, logits = numbers(torch.float32, tokens, HIDDEN), numbers(torch.float32, tokens, routing.num_experts)
    ours, theirs = (mixture(kernels, torch.float32, routing, activation, with_bias=with_bias)(x, logits)
                    for kernels in (CpuKernels(2), REFERENCE))
    assert distance(ours, theirs) < CLOSE[torch.float32] * max(1, routing.scale)


def test_experts_without_gates():
    routing, halves = ROUTINGS["DeepSeek-V3"], weights(torch.float32, 12, HIDDEN, INNER // 2, with_bias=True)
    experts = [each._replace(down=numbers(torch.float32, HIDDEN, INNER, seed=place) / 8)
               for place, each in enumerate(halves)]
    x, logits = numbers(torch.float32, 40, HIDDEN), numbers(torch.float32, 40, 12)
    ours, theirs = (kernels.experts(experts, routing, PlainActivation("relu2"), no_ends(12))(x, logits)
                    for kernels in (CpuKernels(2), REFERENCE))
    assert distance(ours, theirs) < CLOSE[torch.float32] * routing.scale


def test_a_correction_chooses_and_changes_no_share():
    routing = replace(ROUTINGS["MiniMax-M2"], correction=torch.tensor([0.0, 9, 0, 9, 0, 9, 0, 0]))
    logits = numbers(torch.float32, 5, 8)
    chosen, shares = route(logits, routing)
    assert (chosen.sort().values == torch.tensor([1, 3, 5])).all()
    scores = logits.sigmoid().gather(1, chosen)
    assert distance(shares, scores / scores.sum(-1, keepdim=True)) < 1e-6


@pytest.mark.parametrize(("num_best", "expected"), [(1, {0, 1}), (2, {4, 5})])
def test_groups_are_chosen_by_their_best_or_by_the_sum_of_their_two_best(num_best, expected):
    logits = torch.tensor([[3.0, -4, 0, 0, 2, 2]])
    routing = Routing(6, 2, True, "sigmoid", groups=ExpertGroups(3, 1, num_best))
    assert set(route(logits, routing)[0][0].tolist()) == expected


@product_paths.each(paths.DENSE)
@pytest.mark.parametrize("activation", ["silu", CLAMPED])
def test_bfloat16_on_each_path(path, activation):
    routing = Routing(8, 3, True)
    x, logits = numbers(torch.bfloat16, 50, HIDDEN), numbers(torch.bfloat16, 50, 8)
    ours, theirs = (mixture(kernels, torch.bfloat16, routing, activation, with_bias=True)(x, logits)
                    for kernels in (CpuKernels(2, path=path), REFERENCE))
    assert distance(ours, theirs) < CLOSE[torch.bfloat16]


@product_paths.each(paths.QUANTIZED)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized(path, bits):
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


@pytest.mark.parametrize(("kind", "quantization"), [(torch.float32, "none"), (torch.bfloat16, "none"),
                                                    (torch.bfloat16, "int8")])
def test_an_expert_with_many_rows_has_several_blocks_of_them(kind, quantization):
    """So wide rows that those of the second expert are prepared in three blocks or more; the first one has none."""
    kernels, hidden = CpuKernels(2, quantization), 2048
    packed = kernels.experts(weights(kind, 3, hidden, 32), Routing(3, 1, True), "silu", no_ends(3))
    x, logits = numbers(kind, 300, hidden), torch.zeros(300, 3, dtype=kind)
    logits[:, 1], logits[::50, 2] = 1, 2
    together = packed(x, logits)
    assert all(torch.equal(packed(x[i : i + 1], logits[i : i + 1])[0], together[i]) for i in range(0, 300, 10))


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



def packed_weights(name: str, kind: torch.dtype, count: int) -> list[ExpertWeights]:
    def matrix(outputs: int, depth: int, seed: int, kinds: tuple[Format, ...]) -> Weight:
        parts = [random_matrix(each, outputs // len(kinds), depth, seed=seed, is_ordered="order" in name)
                 for each in kinds]
        return stacked([_without_nan(part) if part.format.are_floats else part for part in parts])

    formats = FORMATS[name]
    return [ExpertWeights(matrix(2 * WIDE, WIDE, expert, formats), matrix(WIDE, WIDE, expert + count, formats[:1]),
                          numbers(kind, 2 * WIDE, seed=expert), numbers(kind, WIDE, seed=expert))
            for expert in range(count)]


def _without_nan(matrix: QuantizedMatrix) -> QuantizedMatrix:
    def read(first: int, end: int) -> Rows:
        rows = matrix.read(first, end)
        return rows._replace(codes=rows.codes & 0xFE)

    return replace(matrix, read=read)


def skip_where_refused(kernels: CpuKernels, name: str, kind: torch.dtype) -> None:
    for each in FORMATS[name]:
        if why := kernels.format_refusal(each, kind):
            pytest.skip(why)


@pytest.mark.parametrize("activation", ["silu", CLAMPED])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_multiply_as_products_of_their_own(name, activation):
    """Bit for bit: a token of one expert is that expert's MLP."""
    kind, kernels, experts = torch.bfloat16, CpuKernels(2), packed_weights(name, torch.bfloat16, 5)
    skip_where_refused(kernels, name, kind)
    x, logits = numbers(kind, 40, WIDE), numbers(kind, 40, 5)
    together = kernels.experts(experts, Routing(5, 1, True), activation, no_ends(5))(x, logits)
    for expert, each in enumerate(experts):
        own = x[logits.argmax(1) == expert]
        if activation == "silu":
            inner = kernels.gated(each.gate_up, each.gate_up_bias)(own)
        else:
            inner = kernels.clamped_swiglu(kernels.linear(each.gate_up, each.gate_up_bias)(own), activation)
        assert torch.equal(together[logits.argmax(1) == expert], kernels.linear(each.down, each.down_bias)(inner))


@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_are_close_to_what_they_stand_for(name):
    kind, kernels, experts = torch.bfloat16, CpuKernels(2), packed_weights(name, torch.bfloat16, 6)
    skip_where_refused(kernels, name, kind)
    x, logits = numbers(kind, 30, WIDE), numbers(kind, 30, 6)
    ours, theirs = (each.experts(experts, Routing(6, 3, False), CLAMPED, no_ends(6))(x, logits)
                    for each in (kernels, REFERENCE))
    assert distance(ours, theirs) < CLOSE[kind]


@pytest.mark.parametrize("name", ["Q4_K", "gates in another format"])
def test_a_recorded_mixture_of_packed_experts_follows_the_tokens(name):
    kernels, routing, kind = CpuKernels(2), Routing(8, 2, True), torch.float32
    packed = kernels.experts(packed_weights(name, kind, 8), routing, "silu", no_ends(8))
    x, logits = torch.zeros(9, WIDE, dtype=kind), torch.zeros(9, 8, dtype=kind)
    graph = kernels.record(lambda: packed(x, logits))
    for seed in range(4):
        x.copy_(numbers(kind, 9, WIDE, seed=seed))
        logits.copy_(numbers(kind, 9, 8, seed=seed) * 3)
        expected = packed(x, logits).clone()
        assert torch.equal(graph.run(), expected)
        assert all(torch.equal(packed(x[i : i + 1], logits[i : i + 1])[0], expected[i]) for i in range(9))
