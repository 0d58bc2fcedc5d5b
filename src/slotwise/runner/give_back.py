"""The memory that an engine on the CPU gives back while it sleeps and goes on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slotwise.kernels.cpu.memory import discard
from slotwise.runner import memory
from slotwise.runner.prefault import Prefault


class Returnable:
    """The caches, whose contents are lost, and weights that lie in files, which are read again when they are needed.

    Args:
        caches: pre-faults the caches of all layers.
        mapped: bytes of files, which nothing writes to.
    """

    def __init__(self, caches: Prefault, mapped: Sequence[Tensor]) -> None:
        self._caches = caches
        self._mapped = mapped

    def give_back(self) -> None:
        """Return the memory to the system; no request may be in a step.  Raises OSError: the system cannot."""
        self._caches.give_back()
        for each in self._mapped:
            discard(each.data_ptr(), each.nbytes)
        memory.give_back()
