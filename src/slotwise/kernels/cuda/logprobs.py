"""What a row's logits say about the token it was given.  Few requests ask, so plain torch does."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LogProbabilities(NamedTuple):
    """Of one token a row, and of the most probable ones."""

    chosen: Tensor  # [rows] float32
    ranks: Tensor  # [rows] int64, 1 for the most probable
    top_ids: Tensor  # [rows, k] int64, best first, ties by id
    top: Tensor  # [rows, k] float32


def log_probabilities(logits: Tensor, tokens: Tensor, k: int) -> LogProbabilities:
    """Natural logarithms under `logits [rows, vocab]` of `tokens [rows]` int64 and of the `k` most probable.

    On the logits' device, without waiting for it.
    """
    values = logits.float()
    total = values.logsumexp(1, keepdim=True)
    given = values.gather(1, tokens[:, None])
    ordered, ids = values.sort(1, descending=True, stable=True)
    return LogProbabilities((given - total)[:, 0], 1 + (values > given).sum(1), ids[:, :k], ordered[:, :k] - total)
