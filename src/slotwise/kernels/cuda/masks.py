"""Grammars' masks, applied to logits where these lie."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slotwise.kernels.cuda.jit import jit_varying

_WORDS = tl.constexpr(64)  # of a mask, that a program reads


def mask_rows(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """Set what masks do not allow to minus infinity, in place; returns `logits`.

    Args:
        logits: `[all rows, vocab]`, rows contiguous.
        rows: `[rows]` int64, those that have a mask.
        bits: `[rows, words]` int32: bit i of word i // 32 allows token i.
    """
    if len(rows):
        words = bits.shape[1]
        _mask_rows[(len(rows), triton.cdiv(words, _WORDS.value))](
            logits, rows, bits, STRIDE=logits.stride(0), VOCAB=logits.shape[1], WORDS=words, num_warps=4)
    return logits


@jit_varying(alignments=("rows", "bits"))
def _mask_rows(
    logits: tl.tensor, rows: tl.tensor, bits: tl.tensor, STRIDE: tl.constexpr, VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    mask, word = tl.program_id(0), tl.program_id(1) * _WORDS + tl.arange(0, _WORDS)
    allowed = tl.load(bits + mask.to(tl.int64) * WORDS + word, word < WORDS, -1)
    place = tl.arange(0, 32)
    token = word[:, None] * 32 + place[None, :]
    forbidden = ((allowed[:, None] >> place[None, :]) & 1) == 0
    row = tl.load(rows + mask).to(tl.int64)
    nothing = tl.full([_WORDS, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * STRIDE + token, nothing, forbidden & (token < VOCAB))
