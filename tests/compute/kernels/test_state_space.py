"""Short convolutions, the gated delta rule and the rules of Mamba and Mamba-2 on the CPU against the reference.

The rules are also compared with those of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged import distance
from torch import Tensor

from slotwise.compute.kernels.checked import CheckedKernels
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.interface import (
    AttentionShape,
    ConvolutionShape,
    ConvolutionWeights,
    DeltaShape,
    DeltaWeights,
    Kernels,
    LayerCache,
    RaggedBatch,
    SelectiveInputs,
    SelectiveShape,
    SelectiveWeights,
    StateShape,
    StateSpaceShape,
    StateSpaceWeights,
)
from slotwise.compute.kernels.reference import ReferenceKernels

CPU, REFERENCE = CheckedKernels(CpuKernels(threads=2)), CheckedKernels(ReferenceKernels())
EVERY = pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
BLOCKS = 60
SPACE = StateSpaceShape(4, 8, 2, 5, 3, norm_groups=2)
DELTA = DeltaShape(2, 4, 32, 32, 4)
SHAPES: list[StateShape] = [ConvolutionShape(24, 3), SPACE, SelectiveShape(24, 4, 3, 2, num_groups=2), DELTA]
EACH = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)


@dataclass
class Sequence:
    """A row's inputs, how far they are computed, and its blocks."""

    inputs: Tensor
    blocks: list[int]
    done: int = 0


class Layer:
    """A layer over a cache whose blocks hold NaN where nothing was written."""

    def __init__(self, kernels: Kernels, shape: StateShape, kind: torch.dtype, block_size: int) -> None:
        self._draw = torch.Generator().manual_seed(0)
        self.kernels, self.shape, self.kind, self.block_size = kernels, shape, kind, block_size
        self.convolution = ConvolutionWeights(self.normal(shape.taps, shape.channels), self.normal(shape.channels))
        self.weights: Any = None
        if isinstance(shape, DeltaShape):
            heads = shape.num_value_heads
            self.weights = DeltaWeights(self.convolution.taps, -self.normal(heads).exp(), self.normal(shape.num_decays),
                                        1 + 0.1 * self.normal(shape.value_dim), 1e-6)
        if isinstance(shape, SelectiveShape):
            self.weights = SelectiveWeights(-self.normal(shape.state_size, shape.size).exp(), self.normal(shape.size))
        if isinstance(shape, StateSpaceShape):
            norm = 1 + 0.1 * self.normal(shape.values) if shape.norm_groups else None
            self.weights = StateSpaceWeights(
                self.convolution, *(each(self.normal(shape.num_heads)) for each in (
                    lambda x: -x.exp(), lambda x: x, lambda x: x)), norm, 1e-6)
        self.cache: LayerCache = kernels.allocate_cache(BLOCKS, block_size, shape, kind)
        for piece in kernels.cache_pieces(self.cache):
            piece.view(torch.int8).fill_(-1)
        self._free = torch.randperm(BLOCKS, generator=self._draw).tolist()

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._draw)

    def sequence(self, tokens: int) -> Sequence:
        """A new one of so many tokens."""
        shape, width = self.shape, 3 * self.shape.channels
        if isinstance(shape, DeltaShape):
            width = shape.channels + shape.values + shape.num_value_heads + shape.num_decays
        if isinstance(shape, SelectiveShape):
            width += 2 * shape.num_groups * shape.state_size
        if isinstance(shape, StateSpaceShape):
            width = shape.values + shape.channels + shape.num_heads
        return Sequence(self.normal(tokens, width).to(self.kind), self.blocks(tokens))

    def blocks(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self.block_size))]

    def step(self, rows: list[tuple[Sequence, int]], on_trial: list[int] | None = None) -> list[Tensor]:
        """Computes the next so many tokens of each row."""
        counts = [count for _, count in rows]
        starts = torch.tensor([0, *counts]).cumsum(0)
        contexts = [sequence.done + count for sequence, count in rows]
        tables = torch.full((len(rows), max(len(row.blocks) for row, _ in rows) + 1), -1, dtype=torch.int32)
        for table, (row, _) in zip(tables, rows, strict=True):
            table[: len(row.blocks)] = torch.tensor(row.blocks)
        zeros = torch.zeros(int(starts[-1]), dtype=torch.int64)
        batch = RaggedBatch(zeros, zeros, zeros, starts.int(), torch.tensor(contexts).int(), tables, starts[1:] - 1,
                            max(counts), max(contexts),
                            on_trial=None if on_trial is None else torch.tensor(on_trial, dtype=torch.int32))
        out = self._run(torch.cat([row.inputs[row.done : row.done + count] for row, count in rows]), batch)
        for row, count in rows:
            row.done += count
        return list(out.split(counts))

    def _run(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        kernels, shape = self.kernels, self.shape
        if isinstance(shape, ConvolutionShape):
            return kernels.gated_convolution(x, self.convolution, self.cache, batch, shape)
        if isinstance(shape, DeltaShape):
            mixed, gates = x.tensor_split([shape.channels + shape.values], dim=1)
            return kernels.gated_delta(
                mixed.contiguous(), gates.contiguous(), self.weights, self.cache, batch, shape)
        if isinstance(shape, StateSpaceShape):
            return kernels.state_space(x, self.weights, self.cache, batch, shape)
        assert isinstance(shape, SelectiveShape)
        shared = shape.num_groups * shape.state_size
        x, steps, gate, b, c = x.split([shape.size] * 3 + [shared] * 2, dim=1)
        convolved = kernels.silu_convolution(x, self.convolution, self.cache, batch, shape)
        inputs = SelectiveInputs(convolved, steps, b, c, gate)
        return kernels.selective_scan(inputs, self.weights, self.cache, batch, shape)


ANY = st.one_of(
    st.builds(ConvolutionShape, st.integers(1, 600), st.integers(2, 5)),
    st.builds(lambda groups, heads, head_dim, state, taps, norms, first: StateSpaceShape(
        groups * heads, head_dim, groups, state, taps, groups if norms else 0, first),
        st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 20), st.integers(1, 5), st.booleans(),
        st.booleans()),
    st.builds(lambda keys, per_key, *sizes: DeltaShape(keys, keys * per_key, *sizes),
              st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(1, 5),
              st.booleans(), st.sampled_from([1.0, 2.0]), st.booleans()),
    st.builds(lambda groups, size, state, taps: SelectiveShape(groups * size, state, taps, 1, groups),
              st.integers(1, 2), st.integers(1, 300), st.integers(1, 20), st.integers(1, 5)))


@settings(max_examples=24, deadline=None)
@given(ANY, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([1, 3, 16]),
       st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3))
def test_chunks_of_rows_in_company(shape, kind, block_size, chunks):
    """Each list holds a row's chunks, computed in as many steps."""
    if sum(map(sum, chunks)) // block_size + len(chunks) > BLOCKS:
        block_size = 16
    done = []
    for kernels in (CPU, REFERENCE):
        layer = Layer(kernels, shape, kind, block_size)
        sequences, results = [layer.sequence(sum(counts)) for counts in chunks], []
        for turn in range(3):
            rows = [(row, counts[turn]) for row, counts in zip(sequences, chunks, strict=True) if turn < len(counts)]
            results += layer.step(rows) if rows else []
        done.append(torch.cat(results))
    assert distance(*done) < (1e-5 if kind == torch.float32 else 1e-2)


@EVERY
def test_the_delta_rule_is_that_of_transformers(kernels):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    shape = DeltaShape(2, 4, 16, 24, 3)
    layer = Layer(kernels, shape, torch.float32, 16)
    row = layer.sequence(41)
    x, z, b, a = row.inputs.split([shape.channels, shape.values, 4, 4], dim=1)
    padded = F.pad(x, (0, 0, 2, 0))
    mixed = F.silu(sum(padded[tap : tap + 41] * layer.convolution.taps[tap] for tap in range(3)))
    query, key, value = (part.reshape(1, 41, -1, size) for part, size in zip(
        mixed.split([32, 32, 96], dim=1), (16, 16, 24), strict=True))
    decay = layer.weights.rate * F.softplus(a + layer.weights.step_bias)
    out, _ = torch_recurrent_gated_delta_rule(query, key, value, decay[None], b.sigmoid()[None],
                                              use_qk_l2norm_in_kernel=True)
    normed = F.rms_norm(out[0], (24,), layer.weights.norm, 1e-6)
    expected = normed.flatten(1) * F.silu(z)
    assert distance(torch.cat([layer.step([(row, count)])[0] for count in (1, 20, 4, 16)]), expected) < 1e-5


@EVERY
@pytest.mark.parametrize("is_normed_first", [False, True], ids=["gate first", "norm first"])
def test_mamba2s_rule_is_that_of_transformers(kernels, is_normed_first):
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, mamba2_chunk_scan

    shape = StateSpaceShape(4, 8, 2, 5, 3, 2, is_normed_first, least_step=0.1, largest_step=1.0)
    layer = Layer(kernels, shape, torch.float32, 16)
    row, weights = layer.sequence(41), layer.weights
    z, x, dt = row.inputs.split([shape.values, shape.channels, 4], dim=1)
    convolved = F.silu(F.conv1d(F.pad(x.T[None], (2, 0)), layer.convolution.taps.T[:, None], layer.convolution.bias,
                                groups=shape.channels))[0].T
    x, b, c = convolved.split([32, 10, 10], dim=1)
    y = mamba2_chunk_scan(
        x.view(1, 41, 4, 8), dt[None], weights.rate, b.view(1, 41, 2, 5), c.view(1, 41, 2, 5), 16, D=weights.skip,
        dt_bias=weights.step_bias, dt_softplus=True, dt_limit=(0.1, 1.0)).view(41, 32)
    norm = MambaRMSNormGated(32, 16, 1e-6)
    norm.weight.data = weights.norm
    expected = norm(y).detach() * F.silu(z) if is_normed_first else norm(y, z).detach()
    assert distance(torch.cat([layer.step([(row, count)])[0] for count in (1, 20, 4, 16)]), expected) < 1e-5


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@EACH
def test_neither_chunks_nor_company_change_a_bit(kind, shape):
    whole = Layer(CPU, shape, kind, 16)
    alone = whole.step([(whole.sequence(70), 70)])[0]
    layer = Layer(CPU, shape, kind, 16)
    row, other = layer.sequence(70), layer.sequence(40)
    parts = [layer.step([(row, count), (other, 8)])[0] for count in (33, 1, 14, 22)]
    assert torch.equal(torch.cat(parts), alone)


@EVERY
@EACH
def test_a_row_on_trial_yields_the_same_and_changes_no_state(kernels, shape):
    plain, layer = (Layer(kernels, shape, torch.float32, 4) for _ in range(2))
    row, other = plain.sequence(20), plain.sequence(20)
    plain.step([(row, 3), (other, 5)])
    expected = torch.cat(plain.step([(row, 9), (other, 2)]))
    row, other = layer.sequence(20), layer.sequence(20)
    layer.step([(row, 3), (other, 5)])

    def stored() -> Tensor:
        return torch.cat([piece.view(torch.int8).flatten() for piece in kernels.cache_pieces(layer.cache)])

    before = stored().clone()
    for flags in ([1, 1], [7, 0]):
        row.done, other.done = 3, 5
        assert torch.equal(torch.cat(layer.step([(row, 9), (other, 2)], flags)), expected)
        assert torch.equal(stored(), before) == (flags == [1, 1])
    row.done = 3
    assert torch.equal(layer.step([(row, 9)])[0], expected[:9])


@EVERY
@EACH
def test_a_full_block_is_a_snapshot_from_which_another_row_goes_on(kernels, shape):
    layer = Layer(kernels, shape, torch.float32, 4)
    row = layer.sequence(14)
    expected = layer.step([(row, 14)])[0]
    for blocks in (1, 2, 3):  # the states behind 4, 8 and 12 tokens, though the row went on
        other = Sequence(row.inputs, row.blocks[:blocks] + layer.blocks(16), 4 * blocks)
        assert torch.equal(layer.step([(other, 14 - other.done)])[0], expected[4 * blocks :])


@EVERY
def test_states_lie_in_blocks_of_keys_and_values_that_are_as_large(kernels):
    shape, attention = DeltaShape(1, 2, 8, 8, 4), AttentionShape(2, 1, 16, 0.25)
    alone, shared = (Layer(kernels, shape, torch.float32, 16) for _ in range(2))
    assert kernels.cache_bytes_per_block(16, attention, torch.float32) >= shape.state_bytes
    assert kernels.cache_bytes_per_block(16, shape, torch.float32) == shape.state_bytes
    shared.cache = kernels.allocate_cache(BLOCKS, 16, attention, torch.float32)
    results = [torch.cat([layer.step([(row, count)])[0] for count in (30, 9)])
               for layer in (alone, shared) for row in [layer.sequence(39)]]
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sigmoid_mul(kind):
    gate, x = torch.randn(5, 33).to(kind), torch.randn(5, 33).to(kind)
    assert distance(CPU.sigmoid_mul(gate, x), gate.double().sigmoid() * x.double()) < 5e-3
    assert distance(CPU.sigmoid_mul(gate, x), REFERENCE.sigmoid_mul(gate, x)) < 5e-3
