"""A request: what is wanted (`RequestSpec`), its tokens, how many of them are computed, and its state machine.

A `RequestSpec` crosses every layer whole, from the API to the ranks and the log: to add a field to requests, add it
here, and read `spec.field` in the code that obeys it.

There is no prefill or decode phase.  A request has *known* tokens (the prompt, then the output) and *computed* tokens,
whose keys and values are in the KV cache.  A step computes up to `known - scheduled` of them; with no step in flight,
the scheduled tokens are the computed ones.  Prefill, chunked prefill, decode and recomputation after a preemption all
follow from this rule (as in vLLM's v1 scheduler).

    known      |■■■■■■■■ prompt ■■■■■■■■|■ output ■|?|     ? pending: sampled by a step in flight, not yet committed
    scheduled  |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|       advanced by Scheduler.schedule()
    computed   |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|         advanced by Scheduler.commit()

Drafts are unverified tokens: a row that verifies k drafts has up to k + 1 pending tokens, and commit() takes back those
not accepted.

Invariants:
 1. Only the scheduler changes a state, along TRANSITIONS; every request ends exactly once.
 2. A preemption and the end of a request start a new *epoch*.  From a step planned in an earlier epoch, commit() keeps
    a preempted request's sampled tokens, whose positions are computed again, and nothing of a request that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from slotwise.core.cache_groups import BlockTable
from slotwise.core.params import PoolingSpec, SamplingSpec
from slotwise.core.prefix_cache import BlockHashes
from slotwise.core.scheduler_limits import SLO


class State(Enum):
    WAITING = "waiting"  # in the queue, not yet admitted
    WAITING_FOR_KV = "waiting_for_kv"  # in the queue for blocks (`kv_transfers.py`) of another engine or of the disk
    RUNNING = "running"  # holds a slot and blocks
    PREEMPTED = "preempted"  # slot and blocks released; in the queue, to be recomputed
    FINISHED = "finished"  # ended, with a finish reason
    REJECTED = "rejected"  # refused before its first step: it could never run, or its grammar cannot be compiled


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.WAITING_FOR_KV, State.RUNNING, State.FINISHED, State.REJECTED}),
    State.WAITING_FOR_KV: frozenset({State.WAITING, State.FINISHED, State.REJECTED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
    State.REJECTED: frozenset(),
}

NO_SLOT_HELD = -1
NO_SLO = SLO()


class Output(Enum):
    """What a request yields."""

    SAMPLE = "sample"  # tokens
    PROMPT_LOGPROBS = "prompt_logprobs"  # tokens, and the log-probabilities of the prompt tokens
    POOLED = "pooled"  # one vector, from the hidden states of the prompt


class KVTransfer(NamedTuple):
    """How the blocks of a request's prompt travel between engines, or come from disk (`core/kv_transfers.py`)."""

    transfer_id: str  # the same in both engines
    sends: bool  # True: the blocks are computed here and sent; False: they are received
    timeout: float  # seconds to wait for the next blocks, or to keep those of an ended request
    host: str = ""  # of the engine that sends
    port: int = 0  # of the engine that sends
    num_on_disk: int = 0  # first blocks of the prompt, which are read from this engine's disk; 0: an engine sends them


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a client wants of one sequence.  Raises ValueError for values out of range."""

    prompt: tuple[int, ...]  # token ids, at least one
    params: SamplingSpec
    seed: int = 0  # 64 bits for the sampler, set by the client or drawn on arrival
    salt: str = ""  # requests share cached prefixes only within the same salt (a tenant)
    slo: SLO = NO_SLO  # tenant, tier, priority and latency objectives
    pooling: PoolingSpec | None = None  # one vector is wanted, and no tokens
    adapter: int = 0  # number of a loaded adapter; 0: the base model
    adapter_name: str = ""  # by which its client named it
    kv: KVTransfer | None = None  # how the blocks of its prompt travel between engines; None: they do not
    prediction: tuple[int, ...] = ()  # what its client expects the output to be: drafts are taken from it
    forced_length: int = 0  # for benchmarks: the output ends at this length as if the model had ended it; 0: not forced
    queue_timeout: float = 0.0  # seconds it may wait for its first slot; 0: without limit
    # The API alone looks for stop strings, and long ones would only make the log larger.
    stop_lengths: tuple[int, ...] = ()  # lengths of the stop strings in characters, where `params` leaves them out
    session: str = ""  # a conversation's or an agent's name, as its tenant chose it; "": it has none
    retain: float = 0.0  # seconds for which its blocks are kept after its end, if others' running requests allow it
    retain_tokens: int = 0  # tokens from the prompt's beginning that `retain` covers; 0: prompt and output
    cache_generation: int = 0  # times that the prefix cache was reset before: nothing from before is found

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(self.prompt))
        for name in ("adapter", "forced_length", "queue_timeout", "retain", "retain_tokens", "cache_generation"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")

    @property
    def salt_owner(self) -> str:
        """Whose salt it is: the tenant, if the salt begins with its name, as that of every API key does; else the salt.

        A tenant without a key could claim any name, so it is told of no other salt.
        """
        tenant = self.slo.tenant
        return tenant if tenant and (self.salt == tenant or self.salt.startswith(tenant + ":")) else ":" + self.salt

    @property
    def output(self) -> Output:
        if self.pooling is not None:
            return Output.POOLED
        return Output.SAMPLE if self.params.prompt_logprobs is None else Output.PROMPT_LOGPROBS

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether all positions of the prompt must be computed: a cached prefix is of no use then."""
        return self.output is Output.PROMPT_LOGPROBS or (self.pooling is not None and self.pooling.reads_all)

    @property
    def max_tokens(self) -> int | None:
        """Most output tokens; None: as many as fit."""
        return self.params.max_tokens if self.pooling is None else 0

    def without_texts(self) -> RequestSpec:
        """Returns it without what a log of bounded size leaves out: prompt, prediction, grammar and transfer."""
        params = self.params if self.params.grammar is None else replace(self.params, grammar=None)
        return replace(self, prompt=(), params=params, prediction=(), kv=None)

    def public(self) -> RequestSpec:
        """Returns it as a stream of events shows it: without texts, salt, session and tenant."""
        return replace(self.without_texts(), salt="", session="", slo=replace(self.slo, tenant=""))


class Namespace(NamedTuple):
    """What prompts must have in common, in addition to their tokens, before they share cached blocks."""

    generation: int  # of the cache
    adapter: int
    salt: str

    @property
    def text(self) -> str:
        """The salt of `BlockHashes`: no other namespace has it, whatever the salts contain."""
        return f"{self.generation}:{self.adapter}:{self.salt}"

    @classmethod
    def of(cls, text: str) -> Namespace:
        generation, adapter, salt = text.split(":", 2)
        return cls(int(generation), int(adapter), salt)


class IllegalTransition(AssertionError):
    """A state change that TRANSITIONS does not list: a bug, never a client's fault."""


class Request:
    """A sequence: its spec and its state.  All of the core reads it; the scheduler and what it calls change it.

    Args:
        request_id: unique among unfinished requests.
        eos_ids: the model's end-of-sequence tokens; they stop the request unless `params.ignore_eos` is set.
    """

    __slots__ = (
        "advance_at", "arrival", "arrived_at", "block_hashes", "capacity", "computes_whole_prompt", "deadline",
        "ends_at", "epoch", "forced", "is_compiling", "kv", "kv_until", "max_len", "num_at_join", "num_computed",
        "num_passed_by", "num_prompt", "num_received", "num_reserved", "num_retained", "num_scheduled", "pending",
        "reason", "request_id", "slot", "spec", "state", "stop_ids", "tables", "tokens",
    )

    def __init__(self, request_id: int, spec: RequestSpec, eos_ids: Sequence[int] = ()) -> None:
        self.request_id = request_id
        self.spec = spec
        self.tokens = list(spec.prompt)  # known tokens, without the pending ones
        self.num_prompt = len(self.tokens)
        self.num_at_join = 0  # tokens known when it was last admitted: computing them is prefill
        self.num_scheduled = 0  # tokens computed, found in the cache, received or in flight
        self.num_computed = 0  # tokens whose keys and values are in the cache, without those of steps in flight
        self.pending = 0  # maximum number of tokens that steps in flight may sample
        self.computes_whole_prompt = spec.computes_whole_prompt
        self.stop_ids = frozenset(spec.params.stop_token_ids) | frozenset(
            () if spec.params.ignore_eos else eos_ids)
        self.state = State.WAITING
        self.is_compiling = spec.params.grammar is not None  # its grammar is not compiled yet: it waits
        # The finish reason of a FINISHED request, the objection to a REJECTED one.  A RUNNING request with a reason is
        # *held*: all its tokens are sampled, and it keeps its slot until its batch has ended.
        self.reason = ""
        self.arrival = -1  # arrival number: the tie-breaker of every order
        self.arrived_at = 0.0  # seconds
        self.deadline = float("inf")  # seconds; a request not admitted by then times out
        self.num_passed_by = 0  # later arrivals admitted while it waited for blocks or an adapter's slot
        self.max_len = 0  # maximum length in tokens, prompt and output; a pooled request's vector counts as one token
        self.ends_at = 0  # `max_len`, or the length at which its output is forced to end
        self.slot = NO_SLOT_HELD
        # By cache group.  Empty without a slot, unless it waits for blocks of its prompt, or has waited.
        self.tables: list[BlockTable] = []
        self.capacity = 0  # tokens that fit in the blocks of every group
        self.num_reserved = 0  # blocks allocated on admission; truncation keeps them
        self.block_hashes = BlockHashes(
            Namespace(spec.cache_generation, spec.adapter, spec.salt).text, spec.salt_owner)
        self.advance_at = 0  # number of computed tokens at which the next block is full
        self.epoch = 0
        self.kv = spec.kv  # None where it neither sends blocks nor receives any
        self.kv_until = 0.0  # seconds; until then a request that holds blocks waits for their contents
        self.num_retained = 0  # tokens whose blocks its retention claims since it released them
        self.num_received = 0  # tokens whose keys and values another engine has sent, or which were read from disk
        # A number of known tokens, and the tokens that its grammar forces after them.
        self.forced: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def num_on_disk(self) -> int:
        """The first blocks of its prompt that are read from disk instead of computed."""
        return 0 if self.kv is None else self.kv.num_on_disk

    @property
    def blocks(self) -> list[int]:
        """The blocks that it holds, group by group."""
        return [block for table in self.tables for block in table.blocks]

    @property
    def holds_slot(self) -> bool:
        return self.slot != NO_SLOT_HELD

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def unscheduled(self) -> int:
        """Known tokens not yet scheduled: 1 while decoding."""
        return len(self.tokens) + self.pending - self.num_scheduled

    @property
    def is_verifying(self) -> bool:
        """Whether a step in flight verifies drafts: how many tokens it yields is not known.

        Without drafts at most one token is pending when a step is scheduled.
        """
        return self.pending > 1

    @property
    def ended(self) -> bool:
        return self.state is State.FINISHED or self.state is State.REJECTED

    def limit(self, max_len: int) -> None:
        """Set the maximum length, in tokens."""
        self.max_len = self.ends_at = max_len
        if self.spec.forced_length:
            self.ends_at = min(max_len, self.num_prompt + self.spec.forced_length)

    def transition(self, state: State) -> None:
        """Change the state.  Raises IllegalTransition for a change that TRANSITIONS does not list."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.request_id}: {self.state.name} -> {state.name}")
        self.state = state

    def start_from(self, num_computed: int) -> None:
        """Set the first `num_computed` tokens as computed (cached or received, or 0 where its blocks are lost)."""
        self.num_scheduled = self.num_computed = num_computed

    def schedule(self, count: int) -> bool:
        """Schedule the next `count` tokens.  Returns whether the step samples: it does at the last known token."""
        self.num_scheduled += count
        if self.num_scheduled < len(self.tokens) + self.pending:
            return False
        self.pending += 1
        return True

    def schedule_drafts(self, num_drafts: int) -> None:
        """Schedule drafts, to be verified, after the last known token, which is scheduled."""
        self.num_scheduled += num_drafts
        self.pending += num_drafts

    def unschedule(self) -> None:
        """Undo the scheduling of all steps in flight."""
        self.pending = 0
        self.num_scheduled = self.num_computed

    def append(self, tokens: tuple[int, ...], num_drafts: int = 0) -> tuple[tuple[int, ...], str]:
        """Append the tokens of a row that verified `num_drafts`.  Returns those kept, and the finish reason or "".

        Tokens after the one that ends the request are dropped.
        """
        all_tokens, kept, reason = self.tokens, tokens, ""
        self.pending -= 1 + num_drafts
        num_known = len(all_tokens) + 1
        if len(tokens) == 1 and tokens[0] not in self.stop_ids and num_known < self.ends_at:  # the common case
            all_tokens.append(tokens[0])
            return tokens, ""
        for index, token in enumerate(tokens):
            all_tokens.append(token)
            if token in self.stop_ids and self.num_output >= self.spec.params.min_tokens:
                kept, reason = tokens[: index + 1], "stop"
            elif len(all_tokens) >= self.max_len:
                kept, reason = tokens[: index + 1], "length"
            elif 0 < self.spec.forced_length <= self.num_output:
                kept, reason = tokens[: index + 1], "stop"
            if reason:
                break
        return kept, reason

    def pool(self, end: int) -> str:
        """Count a row of a pooled request, which has computed the tokens until `end`.  Returns the finish reason."""
        if end < self.num_prompt:
            return ""
        self.pending -= 1
        return "stop"

    def __repr__(self) -> str:
        return (f"Request({self.request_id!r}, {self.state.name}, known={len(self.tokens)}+{self.pending}, "
                f"scheduled={self.num_scheduled}, computed={self.num_computed})")
