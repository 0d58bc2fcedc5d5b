"""An engine as it says of itself that it is ready, for observers that never see one."""

from __future__ import annotations

from slotwise.batching.settings import Batching
from slotwise.core.limits import SchedulerLimits
from slotwise.engine.messages import EngineInfo
from slotwise.engine.scheduling import Scheduling

MS = 1_000_000
LIMITS = SchedulerLimits(max_model_len=100, num_blocks=10, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)


def engine(max_num_seqs: int = 4) -> EngineInfo:
    return EngineInfo("a model", "cpu", "float32", 23, LIMITS, Scheduling(Batching(), max_num_seqs, 64), (0,))
