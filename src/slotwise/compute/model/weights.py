"""The weights of an open checkpoint: all that a model reads exist, have its shapes, and are finite numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Rows, StackedMatrix, Weight, stacked
from slotwise.compute.model.gguf.gguf_tensors import open_gguf_tensors
from slotwise.compute.model.layers.rank_weights import NO_CUTS
from slotwise.compute.model.names import HEAD
from slotwise.compute.model.quantization.quantization_methods import with_quantized
from slotwise.compute.model.quantization.scheme import Quantization
from slotwise.compute.model.stored_tensors import (
    WHOLE,
    Cut,
    Cuts,
    Read,
    Shapes,
    StoredTensor,
    TensorSource,
    TransposedTensor,
    open_safetensors,
)
from slotwise.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Receives bytes read so far and bytes in all."""

DENSE = ("BF16", "F16", "F32", "F64")
MATRIX = 2  # dimensions
COMPARED_NUMBERS = 1 << 22  # of two matrices, at a time
BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
           ".attn.causal_mask", ".self_attn.slope_rate", ".self_attn.query_decay", ".self_attn.key_decay",
           ".self_attn.diagonal_decay")
"""Endings of the names of tensors that the config determines: frequencies, causal masks and decays."""
_NAMED = 3  # tensors named in an error before "and n more"


class CheckpointWeights:
    """An open checkpoint: a folder with safetensors files, or a GGUF file.

    Raises:
        CheckpointError: there are no weights, a file is damaged, or files do not match.
    """

    def __init__(self, checkpoint: Path, modules: Sequence[str] = ()) -> None:
        """Args: modules: names of folders in it, whose tensors begin with these names."""
        self._source: TensorSource = (
            open_gguf_tensors(checkpoint) if checkpoint.is_file() else open_safetensors(checkpoint, modules))
        self._tensors = self._source.tensors
        self._widened: frozenset[str] = frozenset()

    def holds(self, name: str) -> bool:
        return name in self._tensors

    @property
    def lack_head(self) -> bool:
        """Whether the model was saved without its head, which is then valid."""
        return self._source.is_headless and not any(name.startswith(f"{HEAD}.") for name in self._tensors)

    def are_stored_as(self, kind: str) -> bool:
        """Whether any tensor is stored as `kind`, by its name in the file."""
        return any(tensor.kind == kind for tensor in self._tensors.values())

    def formats(self, expected: Shapes) -> dict[str, Format]:
        """The formats of these tensors, by name, as far as they are read as quantized matrices."""
        found = {name: self._tensors[name].format for name in expected if name in self._tensors}
        return {name: kind for name, kind in found.items() if kind is not None and name not in self._widened}

    def are_equal(self, one: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two stored matrices are the same once they are `dtype`, compared a few rows at a time."""
        first, second = self._tensors[one], self._tensors[other]
        is_usable = {first.kind, second.kind} <= set(DENSE)
        if not is_usable or len(first.shape) != MATRIX or second.shape != first.shape:
            return False
        rows = max(1, COMPARED_NUMBERS // max(1, first.shape[1]))
        return all(torch.equal(first.rows(at, at + rows).to(dtype), second.rows(at, at + rows).to(dtype))
                   for at in range(0, first.shape[0], rows))

    def transpose(self, products: Collection[str]) -> None:
        """Reads the plain weights of products whose names end so as transposed, in a folder from now on."""
        if products and not self._source.is_exact:
            endings = tuple([f".{name}.weight" for name in products])
            self._tensors = {
                name: TransposedTensor(tensor) if name.endswith(endings) and tensor.kind in DENSE and
                len(tensor.shape) == MATRIX else tensor for name, tensor in self._tensors.items()}
            self._source = replace(self._source, tensors=self._tensors)

    def assemble(self, quantization: Quantization | None, expected: Shapes) -> None:
        """Combines the parts of each weight that is quantized according to `quantization` into one tensor.

        Raises CheckpointError when parts are missing, or have another shape or type than the config says.
        """
        if quantization is not None:
            self._source = with_quantized(self._source, quantization, expected)
            self._tensors = self._source.tensors

    def widen(self, names: Collection[str]) -> None:
        """Reads these quantized matrices as plain numbers from now on."""
        self._widened |= frozenset(names)

    def leave_out(self, beginnings: Sequence[str]) -> None:
        """Leaves out the tensors whose names begin so."""
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if not name.startswith((*beginnings,))}

    def check(self, expected: Shapes) -> None:
        """Checks that exactly the expected tensors exist.

        Raises CheckpointError when tensors are missing, have another shape or are stored in a way that is not
        supported, or when a served layer has tensors that are not expected: its output would be silently wrong.
        """
        self._check_names(expected)
        self._check_shapes(expected)

    def reader(
        self, expected: Shapes, dtype: torch.dtype, progress: Progress | None = None, wanted: Collection[str] = (),
    ) -> Read:
        """Checks these tensors and returns a function that reads them as `dtype`; `wanted`: the ones that are read.

        Raises CheckpointError as `check` does.  The returned function raises it for a tensor that holds NaN, infinity
        or a number too large for `dtype`; so does a quantized matrix that it returns, when it is unpacked.
        """
        self.check(expected)
        total, done = sum(self._tensors[name].nbytes for name in wanted or expected), 0

        def read(*names: str, cuts: Cuts = NO_CUTS, kind: torch.dtype = dtype) -> Weight:
            nonlocal done
            tensors = [self._tensors[name] for name in names]
            are_quantized = len(self.formats(dict.fromkeys(names, ()))) == len(names)
            weight: Weight = (
                stacked([cuts.get(name, WHOLE).of(self._matrix(name), name) for name in names]) if are_quantized
                else self._dense(names, kind, cuts))
            if isinstance(weight, StackedMatrix) and any(part.format.are_floats for part in weight.parts):
                raise CheckpointError(f"{self._source.where}: {self._list([*names])} are one product, but not in the "
                                      "same format: with FP8 that is not supported")
            done += sum(tensor.nbytes for tensor in tensors)
            if progress is not None:
                progress(done, total)
            return weight

        return read

    def _dense(self, names: tuple[str, ...], dtype: torch.dtype, cuts: Cuts) -> Tensor:
        """Tensors stacked, in memory of their own; quantized ones only if they are widened, or others are plain."""
        # `cat` copies even a single tensor: nothing refers to the file once it has been read.
        pieces = [piece.to(dtype) for name in names for piece in self._pieces(name, cuts.get(name, WHOLE))]
        tensor = torch.cat([torch.atleast_1d(piece) for piece in pieces])
        if not _is_finite(tensor):
            raise self._not_finite(names, dtype)
        return tensor

    def _pieces(self, name: str, cut: Cut) -> Iterator[Tensor]:
        """A tensor's numbers, of a quantized matrix some outputs at a time: dequantized they are many bytes."""
        tensor = self._tensors[name]
        if tensor.format is None or len(tensor.shape) > MATRIX:
            parts = [tensor.rows(rows.start, rows.stop) for rows in cut.rows] or [_whole(tensor)]
            yield from map(cut.columns_of, parts)
            return
        matrix = Cut(cut.rows).of(self._matrix(name), name)
        rows = max(1, COMPARED_NUMBERS // matrix.depth)
        for at in range(0, matrix.outputs, rows):
            yield cut.columns_of(matrix.dequantized(at, min(at + rows, matrix.outputs)))

    def _matrix(self, name: str) -> QuantizedMatrix:
        """A quantized matrix whose scales are checked as they are read."""
        matrix = self._tensors[name].matrix()
        inner = matrix.read

        def read(first: int, end: int) -> Rows:
            rows = inner(first, end)
            for factors in (rows.scales, rows.minimums):
                for numbers in () if factors is None else (factors.values, factors.units):
                    if numbers is not None and numbers.is_floating_point() and not _is_finite(numbers):
                        raise CheckpointError(f"{self._source.where}: {self._source.shown(name)} holds NaN or infinite "
                                              "scales: download the checkpoint again")
            return rows

        return replace(matrix, read=read)

    def _check_names(self, expected: Shapes) -> None:
        where, described = self._source.where, self._source.described_by
        missing = [name for name in expected if name not in self._tensors]
        if missing:
            raise CheckpointError(
                f"{where} lacks {len(missing)} of {len(expected)} weights: {self._list(missing)}; "
                f"download the checkpoint again, or check that {described} belongs to it"
            )
        layers = {name.split(".")[2] for name in expected if name.startswith("model.layers.")}
        unread = sorted(
            name for name in self._tensors
            if name not in expected
            and (self._source.is_exact or (name.startswith("model.layers.") and name.split(".")[2] in layers))
            and not name.endswith(BUFFERS)
        )
        if unread:
            raise CheckpointError(
                f"{where} holds {len(unread)} weights that its {described} leaves no room for: {self._list(unread)}; "
                f"check that {described} belongs to it"
            )

    def _check_shapes(self, expected: Shapes) -> None:
        where, described = self._source.where, self._source.described_by
        for name, shape in expected.items():
            stored, shown = self._tensors[name], self._source.shown(name)
            if stored.shape != shape:
                raise CheckpointError(
                    f"{where}: {shown} has shape {list(stored.shape)}, but {described} asks for {list(shape)}")
            if stored.kind not in DENSE and stored.format is None:
                raise CheckpointError(f"{where}: {shown} is stored as {stored.kind}, which is not supported")

    def _not_finite(self, names: tuple[str, ...], dtype: torch.dtype) -> CheckpointError:
        """The error for the first of these tensors that is not finite as `dtype`."""
        tensors = {name: _whole(self._tensors[name]) for name in names if self._tensors[name].kind in DENSE}
        where = self._source.where
        name = next((name for name, tensor in tensors.items() if not _is_finite(tensor.to(dtype))), names[0])
        shown = self._source.shown(name)
        if name in tensors and not _is_finite(tensors[name]):
            return CheckpointError(f"{where}: {shown} holds NaN or infinite numbers: download the checkpoint again")
        kind = str(dtype).removeprefix("torch.")
        return CheckpointError(f"{where}: {shown} holds numbers too large for {kind}: try --dtype float32")

    def _list(self, names: list[str]) -> str:
        more = len(names) - _NAMED
        return ", ".join(map(self._source.shown, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def _whole(tensor: StoredTensor) -> Tensor:
    return tensor.rows(0, tensor.shape[0] if tensor.shape else 1)


def _is_finite(tensor: Tensor) -> bool:
    """At the speed of memory: the least and the greatest are NaN where any number is."""
    return all(bound.isfinite().item() for bound in tensor.aminmax())
