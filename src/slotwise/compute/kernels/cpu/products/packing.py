"""Packs a model's weights for products, each for the path of its type, which `paths.py` chooses."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu import pointwise
from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.products import (
    block_layout,
    linear,
    linear_bf16,
    linear_blocks,
    linear_fp8,
    linear_fp16,
    linear_fp32,
    linear_widened,
    onednn,
    paths,
)
from slotwise.compute.kernels.cpu.products.gemm import GATED, PLAIN, WIDE
from slotwise.compute.kernels.cpu.products.linear import PackedPart, PackedProduct
from slotwise.compute.kernels.cpu.products.quantize import FORMATS, HEAD, MOMENTS, InputMoments, quantized
from slotwise.compute.kernels.interface import Linear
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, StackedMatrix, Weight


class Packing:
    """Packs the weights of one model.

    Args:
        quantization: "none" or one of `quantize.FORMATS`, for weights that are tensors.
        forced: a path from `paths.forced`; "": the fastest path.
    """

    def __init__(self, launcher: KernelLauncher, quantization: str, forced: str) -> None:
        self._launcher, self._forced = launcher, forced
        self._format = FORMATS.get(quantization)  # None: tensors are not quantized
        self._head_format = HEAD if self._format else None
        self._tables = weakref.WeakKeyDictionary[QuantizedMatrix, linear_blocks.PackedBlocks]()
        self._layouts: set[block_layout.BlockLayout] = set()
        self._lookups: set[CompiledKernel] = set()
        self._products = weakref.WeakKeyDictionary[linear_blocks.BlocksProduct, None]()  # in the order of packing
        self._recorded: InputMoments | None = None
        self._moments: Iterator[Tensor] | None = None

    @property
    def compensates(self) -> bool:
        """Whether the rounding of weights gains from `recording` their inputs."""
        return self._format is not None and self._format.has_minimums

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """The moments of the inputs of all products packed within the context, summed up as long as these are used.

        Such products are in int8, so that they take as little memory as possible, and not kept on disk.  Experts are
        not recorded.
        """
        panels, self._launcher.panels = self._launcher.panels, self._launcher.weights
        self._recorded = InputMoments()
        try:
            yield self._recorded.found
        finally:
            self._launcher.panels, self._recorded = panels, None

    @property
    def quantizes(self) -> bool:
        """Whether weights that are tensors are quantized."""
        return self._format is not None

    @contextmanager
    def centering(self) -> Iterator[None]:
        """Center the inputs of products (`quantize.py`), by those that they get within the context."""
        for product in self._products:
            product.keep_inputs()
        yield
        for product in self._products:
            product.center()

    @contextmanager
    def compensating(self, moments: Sequence[Tensor]) -> Iterator[None]:
        """Within the context, the products of a model that was packed while `recording` are packed again."""
        self._moments = iter(moments)
        try:
            yield
        finally:
            self._moments = None

    def path(self, kind: torch.dtype) -> str:
        """The path of products with weights of `kind`, by its name in `paths.py`.

        Once a matrix was packed as blocks, the path of blocks: most weights of such a checkpoint are blocks.
        """
        return self._quantized if self._format or self._layouts else self._path_of(kind)

    def _path_of(self, kind: torch.dtype) -> str:
        """The path of unquantized weights of `kind`."""
        return self._dense if kind == torch.bfloat16 else "float32"

    @functools.cached_property
    def _dense(self) -> str:
        return paths.dense(self._forced)

    @functools.cached_property
    def _quantized(self) -> str:
        return paths.quantized(self._forced)

    def kernels(self, kind: torch.dtype) -> list[CompiledKernel]:
        """The kernels of products with tensors of `kind`."""
        if self._format:
            layouts = {block_layout.layout_of(format) for format in (self._format, HEAD)}
            return [linear_blocks.product_kernel(layout, kind, linear_blocks.path_for(layout, self._quantized))
                    for layout in sorted(layouts)]
        if kind == torch.float32 and linear_fp32.has_fp32_gemm():
            return [linear_fp32.PRODUCT.code]
        if self._path_of(kind) == "float32" and linear_widened.has_widened_gemm():
            return [linear_widened.PRODUCT[kind].code]
        return {
            "fp16": [linear_fp16.PRODUCT.code], "onednn": [pointwise.SILU_MUL[kind]],
            **{path: [product.code] for path, product in linear_bf16.PRODUCT.items()},
            "float32": [linear.PRODUCT[kind], pointwise.SILU_MUL[kind]]}.get(self._path_of(kind), [])

    def kernels_of_blocks(self, kind: torch.dtype) -> list[CompiledKernel]:
        """The kernels of the quantized matrices packed so far, with activations of `kind`."""
        of_products = [linear_blocks.product_kernel(layout, kind, linear_blocks.path_for(layout, self._quantized))
                       for layout in sorted(self._layouts)]
        of_gates = [pointwise.SILU_MUL[kind]] if of_products else []  # for gates in several formats
        return [*of_products, *sorted(self._lookups, key=lambda code: code.name), *of_gates]

    def refusal(self, format: Format, kind: torch.dtype) -> str:
        """Why products with a format are not supported, in one sentence; "" where they are."""
        if not format.are_floats:
            return block_layout.refusal(format)
        path = self._path_of(kind)
        return linear_fp8.refusal(format) if path in linear_fp8.PRODUCT else (
            f"products with 8-bit floats by {path} are not supported on device cpu")

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """`weight [out, in]`, packed once for many products."""
        matrix = self._as_matrix(weight)
        return self._watched(self._packed(matrix, bias), weight)

    def exact(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """`weight [out, in]`, packed as it is."""
        return self._packed(weight, bias)

    def head(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """`weight [vocab, hidden]`, packed for logits in float32."""
        return self._packed(_as_matrix(weight, self._head_format), bias, WIDE)

    def gated(self, weight: Weight, bias: Tensor | None) -> Linear | None:
        """`weight [2 * intermediate, in]`, gates first, with SiLU in the product; None if its path cannot do that."""
        if isinstance(weight, StackedMatrix):
            return None
        weight = self._as_matrix(weight)
        if isinstance(weight, QuantizedMatrix):
            if weight.format.are_floats:
                return self._of_floats(weight, bias, GATED)
            return self._watched(self._of_blocks([self._blocks(weight, bias, is_gated=True)]), weight)
        assert isinstance(weight, Tensor)
        own = self._own(weight)
        return None if own is None else own(weight, bias, self._launcher, GATED)

    def activated(self, weight: Weight, bias: Tensor | None, number: int) -> Linear | None:
        """`weight [out, in]` with the activation of this number in the product; None if its path cannot do that."""
        if self.quantizes or self._recorded is not None or not isinstance(weight, Tensor):
            return None
        own = self._own(weight)
        if own is None:
            return None
        product = own(weight, bias, self._launcher)
        assert isinstance(product, PackedProduct)
        return replace(product.packed, activation=number).product(self._launcher)

    def can_gate(self, weight: Weight) -> bool:
        """Whether `gated` packs this weight."""
        if not isinstance(weight, Tensor):
            return isinstance(weight, QuantizedMatrix)
        return self._format is not None or self._own(weight) is not None

    def expert(self, weight: Weight, bias: Tensor | None, *, is_gated: bool = False) -> Sequence[PackedPart]:
        """One product of an expert, by our own kernels, in parts along its outputs.

        `is_gated` needs `can_gate`.
        """
        weight = _as_matrix(weight, self._format)
        if isinstance(weight, StackedMatrix):
            return self._stacked(weight, bias)
        if isinstance(weight, QuantizedMatrix) and not weight.format.are_floats:
            return [self._blocks(weight, bias, is_gated=is_gated)]
        if is_gated:
            product = self.gated(weight, bias)
        elif isinstance(weight, QuantizedMatrix):
            product = self._of_floats(weight, bias)
        else:
            product = (self._own(weight) or linear.tiled_linear)(weight, bias, self._launcher)
        assert isinstance(product, PackedProduct)
        return [product.packed]

    def embedding(self, table: QuantizedMatrix, kind: torch.dtype, scale: float) -> Callable[[Tensor], Tensor]:
        """Rows from the panels that a head of the same table reads."""
        packed = self._table(table)
        self._lookups.add(linear_blocks.lookup_kernel(packed.layout, kind))
        return linear_blocks.lookup(packed, table.format, kind, scale, self._launcher)

    def linear_bytes(self, weight: Weight) -> int:
        """Bytes of a packed `linear`."""
        return _bytes(weight, self._format if self._recorded is None else HEAD)

    def head_bytes(self, weight: Weight) -> int:
        """Bytes of a packed `head`."""
        return _bytes(weight, self._head_format)

    def _as_matrix(self, weight: Weight) -> Weight:
        """A tensor as a matrix in the format of the model, unless it has none.

        Raises:
            ValueError: moments were recorded of another model.
        """
        if self._recorded is not None:
            return _as_matrix(weight, HEAD)
        if self._moments is None or self._format is None or not isinstance(weight, Tensor):
            return _as_matrix(weight, self._format)
        moments = next(self._moments, None)
        if moments is None or len(moments) != -(-weight.shape[1] // MOMENTS):
            raise ValueError(f"the inputs of a product of {weight.shape[1]} inputs were not recorded")
        return quantized(weight, self._format, moments)

    def _watched(self, product: Linear, weight: Weight) -> Linear:
        return product if self._recorded is None else self._recorded.watched(product, weight.shape[1])

    def _packed(self, weight: Weight, bias: Tensor | None, form: int = PLAIN) -> Linear:
        if isinstance(weight, QuantizedMatrix) and weight.format.are_floats:
            return self._of_floats(weight, bias, form)
        if isinstance(weight, QuantizedMatrix):
            return self._of_blocks([self._table(weight) if bias is None else self._blocks(weight, bias)], form)
        if isinstance(weight, StackedMatrix):
            return self._of_blocks(self._stacked(weight, bias), form)
        if self._path_of(weight.dtype) == "onednn":
            self._launcher.join_torch()
            return onednn.onednn_linear(weight, bias, is_wide=form == WIDE)
        return (self._own(weight) or linear.tiled_linear)(weight, bias, self._launcher, form)

    def _own(self, weight: Tensor) -> Callable[..., Linear] | None:
        """The function that packs `weight` for products that may be gated; None if its path has no such function."""
        path = self._path_of(weight.dtype)
        if weight.dtype == torch.float32 and linear_fp32.has_fp32_gemm():
            return linear_fp32.fp32_linear
        if path == "float32" and linear_widened.has_widened_gemm():
            return linear_widened.widened_linear
        if path in linear_bf16.PRODUCT:
            return functools.partial(linear_bf16.bf16_linear, path=path)
        return linear_fp16.fp16_linear if path == "fp16" and linear_fp16.fits(weight) else None

    def _of_floats(self, matrix: QuantizedMatrix, bias: Tensor | None, form: int = PLAIN) -> Linear:
        """The product with a matrix of 8-bit floats."""
        path = self._path_of(torch.bfloat16)
        return linear_fp8.fp8_linear(matrix, bias, self._launcher, form, path=path)

    def _of_blocks(self, parts: Sequence[linear_blocks.PackedBlocks], form: int = PLAIN) -> Linear:
        """The product with matrices in panels, concatenated along their outputs."""
        product = linear_blocks.blocks_linear(parts, self._launcher, is_wide=form == WIDE)
        self._products[product] = None
        return product

    def _stacked(self, weight: StackedMatrix, bias: Tensor | None) -> list[linear_blocks.PackedBlocks]:
        """The panels of stacked matrices, in the order of their outputs."""
        biases = [None] * len(weight.parts) if bias is None else bias.split([part.outputs for part in weight.parts])
        return [self._blocks(*each) for each in zip(weight.parts, biases, strict=True)]

    def _table(self, matrix: QuantizedMatrix) -> linear_blocks.PackedBlocks:
        """A matrix without bias in panels, which is packed only once."""
        packed = self._tables.get(matrix)
        if packed is None:
            packed = self._tables[matrix] = self._blocks(matrix, None)
        return packed

    def _blocks(self, matrix: QuantizedMatrix, bias: Tensor | None, *, is_gated: bool = False
                ) -> linear_blocks.PackedBlocks:
        """A matrix in panels; `kernels_of_blocks` includes its kernel from now on."""
        packed = linear_blocks.pack_blocks(matrix, bias, self._quantized, self._launcher, is_gated=is_gated)
        self._layouts.add(packed.layout)
        return packed


def _as_matrix(weight: Weight, format: Format | None) -> Weight:
    """A tensor as a matrix in `format`, unless that is None; what is quantized already stays as it is."""
    return quantized(weight, format) if isinstance(weight, Tensor) and format is not None else weight


def _bytes(weight: Weight, format: Format | None) -> int:
    """Bytes of a packed weight; a tensor is quantized to `format`, unless that is None."""
    if isinstance(weight, StackedMatrix):
        return sum(_bytes(part, format) for part in weight.parts)
    outputs, depth = weight.shape
    if isinstance(weight, QuantizedMatrix) and weight.format.are_floats:
        return linear_fp8.packed_bytes(outputs, depth)
    stored = weight.format if isinstance(weight, QuantizedMatrix) else format
    return outputs * depth * weight.itemsize if isinstance(weight, Tensor) and stored is None else (
        block_layout.layout_of(stored).bytes(outputs, depth))
