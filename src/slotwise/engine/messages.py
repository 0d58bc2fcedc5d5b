"""What passes between the API process and the engine process: commands in, one record per step out.

Encoded as MessagePack by msgspec (see `engine.wire`), so that nothing received can run code.
"""

from __future__ import annotations

from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.core.request import NO_SLO
from slotwise.core.roofline import Roofline
from slotwise.core.slo import SLO
from slotwise.core.step import Copy, Decision, NewBlocks, Stop, TokenLogprobs
from slotwise.core.step_time import Learned
from slotwise.engine.scheduling import Scheduling
from slotwise.engine.struct import Struct


class Add(Struct, tag="add"):
    """Start a generation.  `prompt` are token ids; `seed` is what the sampler draws from.

    `output_tokens` is for benchmarks: the output ends there as if the model had said so (see `engine.forced_lengths`);
    0: never.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    output_tokens: int = 0
    salt: str = ""  # cached beginnings are shared only with requests of the same salt
    queue_timeout: float = 0.0  # seconds it may wait for its first slot; 0: as long as it takes
    received_ns: int = 0  # monotonic, when its request came in and when its prompt was known, for those who tell where
    tokenised_ns: int = 0  # the time went; 0: not over HTTP
    slo: SLO = NO_SLO  # who asks, and what they were promised


class Finish(Struct, tag="finish"):
    """End a generation: `abort` when its client went away, `stop` when a stop string showed up."""

    request_id: str
    reason: str


class Configure(Struct, tag="configure"):
    """Schedule differently from the next plan on.  Checked by whoever sends it."""

    scheduling: Scheduling


Command = Add | Finish | Configure


class QueuePositionQuery(Struct, tag="locate"):
    """Ask where requests stand: no command, for it changes nothing and is no part of what is replayed."""

    number: int  # told back in the answer
    request_ids: tuple[str, ...]


class Loading(Struct, tag="loading"):
    """Progress before the engine is ready."""

    stage: str
    done: int
    total: int


class MemoryUse(Struct, frozen=True):
    """Bytes an engine takes at most: of its device, and `runtime` and `host` of the host, which the CPU's device is."""

    weights: int = 0
    workspace: int = 0  # activations of the largest step
    cache: int = 0
    host: int = 0  # memory of the host for blocks that the cache evicts
    runtime: int = 0  # interpreter, libraries, compiled kernels and what libraries keep: all else of the process

    @property
    def total(self) -> int:
        """All of it; on the CPU what the process may take."""
        return self.weights + self.workspace + self.cache + self.host + self.runtime


class EngineInfo(Struct, tag="ready"):
    """Sent once, when the engine can take requests."""

    model: str
    device: str
    dtype: str
    vocab_size: int
    limits: SchedulerLimits
    scheduling: Scheduling
    eos_token_ids: tuple[int, ...]
    memory: MemoryUse = MemoryUse()
    depth: int = 0  # steps that may be in flight while the next is planned
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    learned: Learned | None = None  # what it knew of step times at the start
    roofline: Roofline | None = None  # what its steps must cost here; None: nobody measured
    threads: int = 1  # that compute
    product_path: str = ""  # what multiplies with the weights, by the kernels' name for it

    @property
    def weights(self) -> str:
        """What the weights are held as, in words."""
        return self.dtype if self.quantization == "none" else f"{self.quantization}, {self.dtype}"

    @property
    def cache_dtype(self) -> str:
        """What keys and values are held as."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


class RowEnd(Struct, array_like=True):
    """A request's end: `message` explains `rejected`, `timeout` and `error`, else it is empty."""

    request_id: str
    reason: str
    num_output: int
    message: str = ""


class StepRecord(Struct, tag="step", omit_defaults=True):
    """One step: the plan without its prompt tokens, what it yielded, who ended, and where the engine stands.

    With the commands sent, records tell all that an engine did not decide itself, so that it can be replayed: what its
    clock showed whenever it looked, and what its executor gave back.

    Rows are columns, as in `core.step.StepPlan`.  `token_ids[i]` belongs to `request_ids[i]`; a void row is empty, and
    so is one whose batch returns as one: all its tokens stand in the record of the step that ends the batch.
    A record may also carry no rows (`step` -1): something that happened between steps, or a step that broke.
    """

    step: int
    started_ns: int  # monotonic
    ended_ns: int
    request_ids: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    admitted: tuple[str, ...] = ()
    cached: tuple[int, ...] = ()  # of each admitted, the tokens that were found in the cache
    preempted: tuple[Decision, ...] = ()
    lost: tuple[int, ...] = ()  # of each preempted, the tokens that were computed
    refused: tuple[Decision, ...] = ()
    stop: Stop | None = None
    ended: tuple[RowEnd, ...] = ()
    released_slots: tuple[int, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    saves: tuple[Copy, ...] = ()
    loads: tuple[Copy, ...] = ()
    planned: tuple[int, ...] = ()  # monotonic: when each plan was begun that was made meanwhile, this or the next
    taken: tuple[int, ...] = ()  # monotonic: when each command since the record before was taken in, in their order
    sampled: tuple[tuple[int, ...], ...] = ()  # what the executor gave for each row, where that is not `token_ids`
    failed: tuple[int, ...] = ()  # rows that could not sample
    failure: str = ""  # why the step broke; its rows' requests are among the `ended`
    configured: Scheduling | None = None  # since the record before
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0


class RequestPosition(Struct, array_like=True):
    """Where a living request stands."""

    request_id: str
    state: str
    num_output: int
    position: int | None = None  # how many are to start before it, by the policy in force; None: it has a slot


class QueuePositionAnswer(Struct, tag="located"):
    """Answers a `QueuePositionQuery` between two steps; who has ended is not in it."""

    number: int
    positions: tuple[RequestPosition, ...]


class Heartbeat(Struct, tag="beat"):
    """A sign of life, sent twice a second by a thread of its own (see `engine.heartbeat`)."""

    step_ns: int  # nanoseconds that the step under way has taken so far; 0: none is


class EngineFailed(Struct, tag="failed"):
    """The engine cannot go on (or could not start); `message` is one line for a person."""

    message: str


Report = Loading | EngineInfo | Heartbeat | StepRecord | QueuePositionAnswer | EngineFailed
