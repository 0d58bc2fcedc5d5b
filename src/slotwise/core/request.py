"""A request: what is known of it, how far it is computed, and which states it may pass through.

There are no phases.  A request has *known* tokens (its prompt, then what it sampled) and *computed* ones, whose keys
and values are in the cache.  A step gives it up to `known - computed` tokens.  Prefill, chunked prefill, decode and
recompute after a preemption are that one rule.

    known      |■■■■■■■■ prompt ■■■■■■■■|■ output ■|?|     ? pending: about to be sampled by a step not yet committed
    scheduled  |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|       advanced by plan()
    computed   |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|         advanced by commit()

Two rules govern a life:
 1. The scheduler alone changes a state, along TRANSITIONS, and every request ends exactly once.
 2. A preemption starts a new *epoch*: results of steps planned before it keep the token they sampled, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from slotwise.core.params import SamplingParams
from slotwise.core.prefix_cache import BlockHashes
from slotwise.core.slo import SLO


class State(Enum):
    WAITING = "waiting"  # has no slot yet
    RUNNING = "running"  # holds a slot and blocks
    PREEMPTED = "preempted"  # gave both back; waits to be computed again
    FINISHED = "finished"  # ended, with a reason
    REJECTED = "rejected"  # refused at the door


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED, State.REJECTED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
    State.REJECTED: frozenset(),
}

NO_SLOT_HELD = -1
NO_SLO = SLO()


class IllegalTransition(AssertionError):
    """A state was asked to change in a way the table does not allow: a bug, never a client's fault."""


class Request:
    """One generation.  Read by everyone in the core, changed by the scheduler alone.

    Args:
        request_id: unique among the living.
        prompt: token ids, at least one.
        params: what the client asked for.
        seed: 64 bits for the sampler.
        eos_ids: the model's end tokens; they end this request unless it ignores them.
        salt: requests share cached beginnings only with those of the same salt: a tenant, an adapter.
        slo: who asks, and what they were promised.
    """

    __slots__ = (
        "arrival", "arrived_at", "block_hashes", "blocks", "capacity", "deadline", "end", "epoch", "expected_tokens",
        "num_computed", "num_passed", "num_prompt", "num_scheduled", "params", "pending", "publish_at", "reason",
        "request_id", "seed", "slo", "slot", "state", "stop_ids", "tokens",
    )

    def __init__(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, seed: int = 0,
        eos_ids: Sequence[int] = (), salt: str = "", slo: SLO = NO_SLO,
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt)  # known tokens, but for those that are pending
        self.num_prompt = len(self.tokens)
        self.num_scheduled = 0  # tokens that steps were given
        self.num_computed = 0  # tokens whose keys and values are in the cache, by the last commit
        self.pending = 0  # tokens that steps in flight are about to sample
        self.params = params
        self.seed = seed
        self.slo = slo
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        self.state = State.WAITING
        self.reason = ""  # why it ended; one still RUNNING is held: it has all its tokens and waits for its batch
        self.arrival = -1  # its number at the door: the tie-breaker of every order
        self.arrived_at = 0.0  # seconds
        self.deadline = float("inf")  # seconds; of the wait for its first slot
        self.expected_tokens = 0  # of output, where a benchmark drew them; 0: nobody knows
        self.num_passed = 0  # later arrivals that took a slot while it waited for blocks
        self.end = 0  # as many tokens as it may ever have
        self.slot = NO_SLOT_HELD
        self.blocks: list[int] = []  # its block table
        self.capacity = 0  # tokens that its blocks hold
        self.block_hashes = BlockHashes(salt)
        self.publish_at = 0  # computed tokens at which its next block is full
        self.epoch = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def unscheduled(self) -> int:
        """Known tokens that no step was given: 1 while it decodes."""
        return len(self.tokens) + self.pending - self.num_scheduled

    @property
    def ended(self) -> bool:
        return self.state is State.FINISHED or self.state is State.REJECTED

    def transition(self, state: State) -> None:
        """Raises IllegalTransition for a change the table does not list."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.request_id}: {self.state.name} -> {state.name}")
        self.state = state

    def start_from(self, num_computed: int) -> None:
        """The cache holds so many of its tokens, and no step was given any other."""
        self.num_scheduled = self.num_computed = num_computed

    def schedule(self, count: int) -> bool:
        """A step computes the next `count` tokens: whether it samples one, which it does when they are the last."""
        self.num_scheduled += count
        if self.num_scheduled < len(self.tokens) + self.pending:
            return False
        self.pending += 1
        return True

    def unschedule(self) -> None:
        """Forget all steps in flight."""
        self.pending = 0
        self.num_scheduled = self.num_computed

    def append(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """Add what a step sampled in the place of one pending token, up to the token that ends the request: those kept,
        and why it ends ("" when it goes on).
        """
        known, kept, reason = self.tokens, tokens, ""
        self.pending -= 1
        if len(tokens) == 1 and tokens[0] not in self.stop_ids and len(known) + 1 < self.end:  # nearly always
            known.append(tokens[0])
            return tokens, ""
        for index, token in enumerate(tokens):
            known.append(token)
            if token in self.stop_ids and self.num_output >= self.params.min_tokens:
                kept, reason = tokens[: index + 1], "stop"
            elif len(known) >= self.end:
                kept, reason = tokens[: index + 1], "length"
            if reason:
                break
        return kept, reason

    def __repr__(self) -> str:
        return (f"Request({self.request_id!r}, {self.state.name}, known={len(self.tokens)}+{self.pending}, "
                f"scheduled={self.num_scheduled}, computed={self.num_computed})")
