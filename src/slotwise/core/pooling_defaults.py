"""How vectors are made where a request says nothing: as the checkpoint says, and the operator keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotwise.core.params import PoolingParams


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """The defaults of a model, or why it gives no vectors."""

    params: PoolingParams = field(default_factory=PoolingParams)
    objection: str = ""  # why vectors would be wrong; "": they are not

    def chosen(self, dimensions: int | None, *, normalize: bool | None) -> PoolingParams:
        """The parameters of a request; None: the default."""
        own = self.params
        return PoolingParams(
            own.pooling_type, own.dimensions if dimensions is None else dimensions,
            own.normalize if normalize is None else normalize)
