"""The adapters of a model that several ranks compute: every rank loads its part of each, or none does.

    rank 0    LoadAdapter ─► loads its part, waits for the others ─► all could: done, else those that could forget it
    rank 1         └───────► loads its part beside its steps ─► AdapterLoaded
"""

from __future__ import annotations

import os
from pathlib import Path

from slotwise.compose.ranks import Ranks
from slotwise.engine.messages import LoadAdapter
from slotwise.errors import CheckpointError
from slotwise.model.lora_weights import LoraWeights


class RankAdapters:
    """Rank 0's hold on the adapters of all ranks; an `engine.adapters.AdapterStore`.

    Args:
        own: those of rank 0.
    """

    def __init__(self, own: LoraWeights, ranks: Ranks) -> None:
        self.num_places = own.num_places
        self._own = own
        self._ranks = ranks

    def load(self, number: int, folder: Path) -> None:
        """Loads an adapter on every rank.  One thread loads at a time.

        Raises:
            CheckpointError: a rank cannot, and none has it now.
            RankLostError: a rank was lost.
        """
        self._ranks.load_adapter(LoadAdapter(number, os.path.abspath(folder)))
        failure: Exception | None = None
        try:
            self._own.load(number, folder)
        except Exception as error:  # the others' answers are read in any case
            failure = error
        loads = self._ranks.adapter_loads()
        objections = [f"rank {rank}: {why}" for rank, why in loads.items() if why]
        if failure is None and not objections:
            return
        self._ranks.unload_adapter(number, [rank for rank, why in loads.items() if not why])
        if failure is not None:
            raise failure
        self._own.unload(number)
        raise CheckpointError(objections[0])

    def unload(self, number: int) -> None:
        """Forgets an adapter, of which no request is left, on every rank."""
        self._own.unload(number)
        self._ranks.unload_adapter(number)
