"""Sampling in plain torch, on any device: the reference for every other implementation on tensors.

The same rules and the same random numbers as `cpu/sampling.py`: min-p, top-k and top-p in this order, ties
kept together, and one uniform number of Philox4x32-10 (Salmon et al., "Parallel Random Numbers", SC 2011) under key
`seed` and counter `index`.  Sums are rounded differently: a token may differ where a cut or a draw falls between two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`draw(logits, controls, seeds, indices)`, as below."""

Mask = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`mask(logits, rows, bits)`, as `allowed_only`; `logits` may be overwritten."""

FAILED = -1  # in place of a token, in a row without a sound distribution
LOG2_E = math.log2(math.e)
_LOW = 0xFFFFFFFF


def draw(logits: Tensor, controls: Tensor, seeds: Tensor, indices: Tensor) -> Tensor:
    """A token for every row, `[rows]` int64; FAILED where a row holds NaN or +inf, or nothing but -inf.

    Args:
        logits: `[rows, vocab]` of any float type.
        controls: `[rows, 4]` float32: temperature (0 is greedy), top_k (0 keeps all), top_p, min_p.
        seeds: `[rows]` int64, 64 bits each.
        indices: `[rows]` int64, the number of outputs before this one.
    """
    scores = logits.float()
    temperature = controls[:, 0]
    largest = scores.amax(-1)
    failed = scores.isnan().any(-1) | largest.isinf()
    ids = torch.arange(scores.shape[1], device=scores.device)
    first = torch.where(scores == largest[:, None], ids, scores.shape[1]).amin(-1)
    scale = LOG2_E / torch.where(temperature > 0, temperature, 1)
    weights = _filtered(torch.exp2((scores - largest[:, None]) * scale[:, None]), controls)
    masses = weights.double().cumsum(-1)
    threshold = uniform(seeds, indices) * masses[:, -1]
    drawn = torch.where((masses > threshold[:, None]) & (weights > 0), ids, scores.shape[1]).amin(-1)
    return torch.where(failed, FAILED, torch.where(temperature > 0, drawn, first))


def _filtered(weights: Tensor, controls: Tensor) -> Tensor:
    """Weights `[rows, vocab]`, 0 for the tokens that are filtered out."""
    top_k, top_p, min_p = controls[:, 1].long(), controls[:, 2], controls[:, 3]
    vocab = weights.shape[1]
    weights = torch.where(weights >= min_p[:, None], weights, 0)
    falling = weights.sort(-1, descending=True).values
    last = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab) - 1
    weights = torch.where(weights >= falling.gather(1, last[:, None]), weights, 0)
    falling = weights.sort(-1, descending=True).values
    masses = falling.double().cumsum(-1)
    enough = masses >= top_p[:, None] * masses[:, -1:]
    cut = falling.gather(1, enough.int().argmax(-1, keepdim=True))
    return torch.where((weights >= cut) | (top_p >= 1)[:, None], weights, 0)


def uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """A float64 in [0, 1) for every pair: 53 of the 128 bits that Philox4x32-10 yields.  Tensors of int64."""
    key_low, key_high = seeds & _LOW, (seeds >> 32) & _LOW
    a, b = indices & _LOW, (indices >> 32) & _LOW
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c  # wraps around, which leaves the 64 bits correct
        a, b = ((right >> 32) & _LOW) ^ b ^ key_low, right & _LOW
        c, d = ((left >> 32) & _LOW) ^ d ^ key_high, left & _LOW
        key_low, key_high = (key_low + 0x9E3779B9) & _LOW, (key_high + 0xBB67AE85) & _LOW
    bits = ((b << 21) | (a >> 11)) & ((1 << 53) - 1)
    return bits.double() * 2.0**-53


def allowed_only(logits: Tensor, rows: Tensor, bits: Tensor) -> Tensor:
    """A copy of `logits [all rows, vocab]`, with minus infinity for the tokens that masks do not allow.

    Args:
        rows: `[rows]` int64, those that have a mask.
        bits: `[rows, words]` int32: bit i of word i // 32 allows token i.
    """
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> places) & 1).view(len(bits), -1)[:, : logits.shape[1]].bool()
    return logits.index_copy(0, rows, logits.index_select(0, rows).masked_fill(~allowed, -torch.inf))
