"""Messages between rank 0, which owns the scheduler, and the other ranks of a model."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from slotwise.core.record import StepPlan
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import AdapterLoaded, LoadAdapter, UnloadAdapter


class Join(Struct, tag="join"):
    """What a rank is: sent once."""

    config: EngineConfig
    rank: int
    memory: int  # descriptor of the memory that the ranks of its stage share
    boxes: int  # descriptor of the memory between stages
    store: int  # descriptor of the file of torch.distributed's store; -1: the ranks exchange through the shared memory


class Measure(Struct, tag="measure"):
    """Run the largest steps for an engine of these settings, whose sums rank 0 takes part in."""

    config: EngineConfig


class Allocate(Struct, tag="allocate"):
    """Make caches and slots for an engine of these limits, in place of those before."""

    limits: SchedulerLimits


class Known(Struct, array_like=True):
    """Tokens that a step has sampled for a slot."""

    slot: int
    start: int  # position of the first
    tokens: tuple[int, ...]


class RunShare(Struct, tag="run"):
    """Compute this rank's share of a plan, once the tokens of the step before are known."""

    plan: StepPlan
    known: list[Known]


class Collect(Struct, tag="collect"):
    """Compute the end of the oldest plan; sent to the ranks of the first stage, where there are several."""


class RankLoaded(Struct, tag="loaded"):
    """The rank has read its weights."""


class Failed(Struct, tag="failed"):
    """The rank cannot go on; the message is one line."""

    message: str


Order = Join | Measure | Allocate | RunShare | Collect | LoadAdapter | UnloadAdapter
RankReport = RankLoaded | Failed | AdapterLoaded

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(RankReport).decode
