"""Messages between the API process and the engine process, commands in, one record per step out, and their observers.

Encoded as MessagePack (see `engine.ipc`), so that nothing received can run code.  An engine in a process of its own
needs msgspec; the offline API, as on a machine with little but torch, does not: its messages are plain dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slotwise.core.params import LAST
from slotwise.core.prompt_lookup import DivergedTokens
from slotwise.core.record import StepRecord, TokenLogprobs
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.step_time import Learned, Roofline
from slotwise.core.transfer.kv_transfer_config import KVTransferConfig
from slotwise.engine.scheduling import Scheduling

if TYPE_CHECKING:
    from msgspec import Struct
else:
    try:
        from msgspec import Struct
    except ImportError:

        class Struct:
            """Accepts the arguments of msgspec's; ignores the options of its encoding."""

            def __init_subclass__(cls, *, frozen: bool = False, **encoding: Any) -> None:
                dataclass(frozen=frozen)(cls)

UNSUBMITTED = -1  # in place of a request's id: `EngineClient.submit` gives it one


class Timing(Struct, frozen=True, omit_defaults=True):
    """When a server had a request, for latencies, traces and timelines.  Monotonic nanoseconds; 0: not over HTTP."""

    received_ns: int = 0  # its first bytes were read
    read_ns: int = 0  # its body was read whole, from which latencies are measured
    tokenized_ns: int = 0  # its prompt was tokenized


class Add(Struct, tag="add", omit_defaults=True):
    """Starts a generation."""

    request_id: int  # from 0 up, in order of submission, and never used again by this server
    spec: RequestSpec
    timing: Timing = Timing()
    name: str = ""  # by which responses, explanations and the timeline show it; begins with the response's id


class Finish(Struct, tag="finish"):
    """Ends a generation: `abort` when its client disconnected, `stop` when a stop string matched."""

    request_id: int
    reason: str


class Configure(Struct, tag="configure"):
    """Changes the scheduling settings from the next plan on.  The sender validates them."""

    scheduling: Scheduling


Command = Add | Finish | Configure


class LoadAdapter(Struct, tag="load_adapter"):
    """Loads an adapter while steps run, under a number that was never used.  Not a command: it changes no plan."""

    number: int
    path: str  # a folder


class UnloadAdapter(Struct, tag="unload_adapter"):
    """Forgets a loaded adapter as soon as no request has it; no `Add` that names it follows.  Not a command either."""

    number: int


class QueuePositionQuery(Struct, tag="locate"):
    """Asks for queue positions.  Not a command: it changes nothing and is not replayed."""

    number: int  # repeated in the answer
    request_ids: tuple[int, ...]


class DivergenceQuery(Struct, tag="diverged"):
    """Asks for the cached tokens around the divergences of prompts.  Not a command: it changes nothing."""

    number: int  # repeated in the answer
    request_ids: tuple[int, ...]


class GiveBack(Struct, tag="give_back"):
    """Asks for the memory of the cache, whose contents nothing will find.  Not a command: no plan depends on it."""


class RemoveStored(Struct, tag="remove_stored"):
    """Asks to remove the blocks on disk of a tenant, or all.

    It is not a command, since the records contain what each request found on disk.
    """

    number: int  # repeated in the answer
    tenant: str | None = None


class StoredRemoved(Struct, tag="stored_removed"):
    """Answers a `RemoveStored` after all files were visited; may arrive between the parts of a step."""

    number: int
    num_blocks: int  # that were removed
    failure: str = ""  # why some are still on disk


class GivenBack(Struct, tag="given_back"):
    """Answers a `GiveBack` once no request runs."""

    objection: str = ""  # why the memory was kept


class AdapterLoaded(Struct, tag="adapter"):
    """Answers a `LoadAdapter`; may arrive between the parts of a step."""

    number: int
    objection: str = ""  # why it cannot be loaded, in one line; "": it is
    digest: str = ""  # of its files


Query = QueuePositionQuery | DivergenceQuery | GiveBack | LoadAdapter | UnloadAdapter | RemoveStored
"""Other messages to an engine: no plan depends on them."""


class Loading(Struct, tag="loading"):
    """Loading progress, before the engine is ready."""

    stage: str
    done: int
    total: int


class MemoryUse(Struct, frozen=True):
    """Most bytes an engine takes: device memory, but host memory for `runtime` and `host` (on the CPU, for all)."""

    weights: int = 0
    workspace: int = 0  # activations of the largest step
    cache: int = 0
    host: int = 0  # host memory for blocks that the cache evicts
    runtime: int = 0  # the rest of the process: interpreter, libraries and their buffers, compiled kernels
    graphs: int = 0  # captured steps on a GPU, all that may be captured; elsewhere they are part of `runtime`

    @property
    def total(self) -> int:
        """The sum; on the CPU the most that the process takes."""
        return self.weights + self.workspace + self.cache + self.host + self.runtime + self.graphs


class EngineInfo(Struct, tag="ready"):
    """Sent once, when the engine is ready for requests."""

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
    speculation: Speculation | None = None  # as resolved for this model; None: no row has drafts
    learned: Learned | None = None  # state of the step-time model at the start
    roofline: Roofline | None = None  # lower bounds of step costs on this machine; None: not measured
    threads: int = 1  # compute threads
    product_path: str = ""  # the kernels' name of the path for products with the weights
    batch_invariant: bool = False  # no position's result depends on what else a step computes
    checkpoint: str = ""  # digest of the model's files when they were read
    hidden_size: int = 0  # numbers of a vector: those of a hidden state, unless Dense modules follow
    num_labels: int = 0  # of the classification head; 0: the model has no such head
    pooling_type: str = LAST  # of the model's family, where files and operator name none
    has_head: bool = True  # without one the model makes vectors, or classifies, only
    tensor_parallel_size: int = 1  # processes that share every layer of a stage
    pipeline_parallel_size: int = 1  # stages that the layers are divided into
    gives_back: bool = False  # the memory of its cache can be given back while no request runs
    expert_layers: tuple[int, ...] = ()  # numbers of the layers with experts
    max_adapters: int = 0  # in memory; 0: requests have none
    kv_transfer: KVTransferConfig | None = None  # how prompts travel; None: they do not
    has_disk: bool = False  # prompts are looked up on disk, too

    @property
    def identity(self) -> tuple[object, ...]:
        """What must be the same in all engines of one server: its tokens and its model."""
        return self.vocab_size, self.eos_token_ids, self.checkpoint

    @property
    def generation_objection(self) -> str:
        """Why the model cannot generate; "" if it can."""
        if self.num_labels:
            return "this model only classifies: its checkpoint has a head of labels, and none that generates"
        return "" if self.has_head else "this model only makes vectors: its checkpoint has no head"

    @property
    def weights(self) -> str:
        """The type in which weights are held, as text."""
        return self.dtype if self.quantization == "none" else f"{self.quantization}, {self.dtype}"

    @property
    def cache_dtype(self) -> str:
        """The type in which keys and values are held."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


class StepOutputs(Struct, tag="outputs"):
    """A part of a step's outputs, sent before its record (see `ipc.messages_of`): columns, as in a StepRecord."""

    request_ids: tuple[int, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    starts: tuple[int, ...] = ()  # the position of each row's first prompt log-probability, less one
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    pooled: tuple[bytes, ...] = ()


class RequestPosition(Struct, array_like=True):
    """State and queue position of an unfinished request."""

    request_id: int
    state: str
    num_output: int
    position: int | None = None  # requests that start before it, by the policy in force; None: it has a slot


class QueuePositionAnswer(Struct, tag="located"):
    """Answers a `QueuePositionQuery` between two steps; omits requests that have ended."""

    number: int
    positions: tuple[RequestPosition, ...]


class DivergenceAnswer(Struct, tag="divergences"):
    """Answers a `DivergenceQuery` between two steps; omits requests whose divergences are forgotten."""

    number: int
    divergences: tuple[DivergedTokens, ...]


class Heartbeat(Struct, tag="beat"):
    """Sent twice a second by a thread of its own (see `ipc.HeartbeatSender`)."""

    step_ns: int  # nanoseconds that the current step has taken so far; 0: no step in progress


class EngineFailed(Struct, tag="failed"):
    """The engine failed or could not start; `message` is one line for a person."""

    message: str


Report = (
    Loading | EngineInfo | Heartbeat | StepOutputs | QueuePositionAnswer | DivergenceAnswer | GivenBack | AdapterLoaded
    | StoredRemoved | EngineFailed)


class Observer:
    """Notified of engines, requests, commands and steps; a subclass overrides the methods it needs.

    Times are monotonic nanoseconds on the engine's clock.
    """

    def started(self, info: EngineInfo) -> None:
        """An engine is ready; it holds no requests."""

    def arrived(self, request_id: int, num_prompt: int, now_ns: int) -> None:
        """A generation was accepted."""

    def refused(self, kind: str) -> None:
        """A generation was refused."""

    def commanded(self, command: Command, now_ns: int) -> None:
        """A command, `Add` included, was sent; called in the order in which the engine handles them."""

    def stepped(self, record: StepRecord) -> None:
        """A step record arrived."""

    def sent(self, request_id: int, first_ns: int, last_ns: int, num_events: int) -> None:
        """A complete response was written to the socket, as `num_events` events."""

    def lost(self, message: str, now_ns: int) -> None:
        """The engine is lost, for the reason `message`.  A record with the end of every request follows."""
