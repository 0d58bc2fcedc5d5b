"""Pooling parameters of the offline API, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PoolingParams:
    """How a prompt becomes a vector; None: as the checkpoint and `pooler_config` say."""

    dimensions: int | None = None  # the first so many numbers are kept
    use_activation: bool | None = None  # the vector is normalised, once it is cut
    normalize: bool | None = None  # the older name of `use_activation`

    @property
    def normalizes(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation
