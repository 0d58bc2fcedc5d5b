"""AWQ (Lin et al., 2024), as AutoAWQ stores it (`version` gemm).

    qweight   [depth, outputs / 8]    words along the outputs, each of eight numbers in the order 0 2 4 6 1 3 5 7
    qzeros    [groups, outputs / 8]   in the same order
    scales    [groups, outputs]

    weight[o, i] = scales[g, o] * (qweight[i, o] - qzeros[g, o]),  g = i // group_size
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import HEAD, Spellings
from slotwise.compute.model.quantization.gptq import RECORDED as OF_GPTQ
from slotwise.compute.model.quantization.patterns import read_skipped
from slotwise.compute.model.quantization.scheme import (
    FLOATS,
    Affine,
    StoredLayer,
    StoredPart,
    choice,
    groups_of,
    read_group,
    refuse_unknown,
    unpack,
    words_of,
)

BITS = 4  # AutoAWQ knows no others
OF_A_WORD = 8  # numbers
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of its numbers in their order
READ = frozenset((
    "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "modules_to_not_convert", "sym",
    "desc_act", "lm_head"))
# Fields about how another program computes; files that transformers 5 has written have those of GPTQ, too.
RECORDED = OF_GPTQ | {"do_fuse", "fuse_max_seq_len", "modules_to_fuse"}


@dataclass(frozen=True, slots=True)
class AWQScheme:
    """One module's weight."""

    group: int  # inputs that share a scale; 0: all of a row

    @property
    def _affine(self) -> Affine:
        return Affine(BITS, self.group, has_zeros=True)

    def format(self, depth: int) -> Format:
        return self._affine.format(depth)

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        groups, words = groups_of(depth, self.group), words_of(outputs, BITS)
        return {
            "qweight": StoredPart(("I32",), ((depth, words),)),
            "qzeros": StoredPart(("I32",), ((groups, words),)),
            "scales": StoredPart(FLOATS, ((groups, outputs),))}

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        words = layer.tensor("qweight")

        def codes(first: int, end: int) -> Tensor:
            start = first // OF_A_WORD
            unpacked = _unpack(words[:, start : words_of(end, BITS)])
            return unpacked[first - start * OF_A_WORD :][: end - first].contiguous()

        zeros = _unpack(layer.tensor("qzeros"))[: layer.outputs]
        return self._affine.matrix(layer, codes, "scales", layer.numbers("scales").t(), zeros)


def _unpack(words: Tensor) -> Tensor:
    """`words [n, outputs / 8]` as `[outputs, n]` uint8."""
    numbers = unpack(words, BITS, words.shape[1] * OF_A_WORD)
    in_order: Tensor = numbers.unflatten(1, (-1, OF_A_WORD))[:, :, PLACES]
    return in_order.flatten(1).t()


class AWQ:
    """The quantization_config of quant_method `awq`."""

    def __init__(self, fields: Fields, spell: Spellings) -> None:
        """Raises CheckpointError for fields that are malformed or not supported."""
        refuse_unknown(fields, "AWQ", RECORDED | READ)
        name = "bits" if fields.has("bits") else "w_bit"
        bits = fields.integer(name, default=BITS)
        if bits != BITS:
            raise fields.error(name, f"must be {BITS} with AWQ, not {bits}")
        choice(fields, "version" if fields.has("version") else "format", "gemm", "gemm")
        if not fields.flag("zero_point", default=True):
            raise fields.error("zero_point", "is false, which is not supported")
        if fields.has("backend") and fields.text("backend").lower() == "llm-awq":
            raise fields.error("backend", "is llm-awq, whose weights are packed in another way: it is not supported")
        for name in ("desc_act", "lm_head"):
            if fields.flag(name):
                raise fields.error(name, "is true, which is not supported with AWQ")
        self._scheme = AWQScheme(
            read_group(fields, "group_size" if fields.has("group_size") else "q_group_size", default=128))
        self._is_skipped = read_skipped(fields, spell, "modules_to_not_convert")
        self.description = f"AWQ, {BITS} bits"

    def scheme(self, module: str) -> AWQScheme | None:
        return None if module == HEAD or self._is_skipped(module) else self._scheme
