"""Replays sessions under each order of eviction, next to a bound from hindsight: what is left to win.

A turn is sent when the one before it has been answered and its pause is over, so a session takes as long as the server
makes it take.  The scheduler, its cache and its orders are the server's; only the time of a step is predicted.

**Hindsight.**  Belady's rule (1966): the block that is needed again last goes first.  No order finds more blocks, given
the same requests in the same order.  A block is needed at the latest when its continuation is; among blocks needed at
the same time the last of a prompt goes first, so the rule never keeps a continuation without its prefix.  The bound is
relaxed: a request takes no time, and holds no blocks while it runs; the order of requests is that of the run under lru.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import EVICTION_POLICIES, HINTED, LRU
from slotwise.engine.messages import Add
from slotwise.measure.simulate.figures import SimulatedRequest, quantile
from slotwise.measure.simulate.simulator import Server, Setup, without_collector
from slotwise.measure.workload.sessions import Session, Turn

RETAINED = 300.0  # seconds that a turn under `hinted` asks for, as Anthropic's default
HINDSIGHT = "hindsight"


class Sent(NamedTuple):
    """A turn that was sent."""

    session: int
    turn: Turn
    request: SimulatedRequest


@dataclass(frozen=True, slots=True)
class Replay:
    """What sessions found and waited for.  Seconds."""

    prompt_tokens: int
    found: int  # prompt tokens found in the cache
    computed: int  # prompt tokens computed, again after a preemption
    ttft_mean: float
    ttft_p99: float
    session_mean: float  # from a session's first request to its last answer
    session_p99: float

    def as_json(self) -> dict[str, float]:
        return {"prompt_tokens": self.prompt_tokens, "found": self.found, "computed": self.computed,
                "found_share": self.found / self.prompt_tokens, "ttft_mean": self.ttft_mean, "ttft_p99": self.ttft_p99,
                "session_mean": self.session_mean, "session_p99": self.session_p99}


def run_sessions(sessions: Sequence[Session], setup: Setup) -> list[Sent]:
    """Returns the turns in the order in which they were sent.

    Under `hinted` each turn of a session with a name asks to be retained, as agents do.
    """
    numbered = list(_numbered(sessions))
    first = {session: number for number, (session, _, _) in reversed(list(enumerate(numbered)))}
    server = Server(setup, {number: turn.output_ids for number, (_, _, turn) in enumerate(numbered)})
    due = [(session.starts_at, first[index]) for index, session in enumerate(sessions)]
    due.sort()
    sent: list[Sent] = []
    active: dict[int, SimulatedRequest] = {}
    retain = RETAINED if setup.limits.eviction_policy == HINTED else 0.0
    while due or active:
        at = due[0][0] if due else inf
        if active and server.next_at < at:
            until = min(at, server.quiet_until)
            server.run_until(until if until > server.next_at else inf, MANY if until > server.next_at else 1)
            for number in [number for number, one in active.items() if one.reason]:
                ended = active.pop(number)
                index, turn, _ = numbered[number]
                if turn + 1 < len(sessions[index].turns):
                    heappush(due, (ended.ended + sessions[index].turns[turn + 1].pause, number + 1))
            continue
        at, number = heappop(due)
        index, _, turn_of = numbered[number]
        name = sessions[index].name
        spec = RequestSpec(tuple(turn_of.prompt_ids), SamplingSpec(
            temperature=0.0, max_tokens=turn_of.output.num_tokens, ignore_eos=True), session=name,
            retain=retain if name else 0.0)
        active[number] = request = server.ask(at, Add(number, spec, name=str(number)))
        sent.append(Sent(index, turn_of, request))
    return sent


MANY = 1 << 40  # steps


def _numbered(sessions: Sequence[Session]) -> Iterator[tuple[int, int, Turn]]:
    """Yields session, number of the turn and turn; the place is the id of its request."""
    for index, session in enumerate(sessions):
        for number, turn in enumerate(session.turns):
            yield index, number, turn


def figures_of(sent: Sequence[Sent]) -> Replay:
    waits = [one.request.ttft or 0.0 for one in sent]
    spans: dict[int, tuple[float, float]] = {}
    for one in sent:
        begin, _ = spans.get(one.session, (one.request.arrived, 0.0))
        spans[one.session] = begin, one.request.ended
    lasted = [end - begin for begin, end in spans.values()]
    return Replay(
        sum([one.turn.num_prompt for one in sent]), sum([one.request.num_cached for one in sent]),
        sum([one.request.num_prefilled for one in sent]), fmean(waits), quantile(waits, 0.99), fmean(lasted),
        quantile(lasted, 0.99))


def compare(sessions: Sequence[Session], setup: Setup, policies: Sequence[str] = EVICTION_POLICIES) -> dict[str, Any]:
    """Returns the figures of `sessions` under each order, and with `lru` the bound from hindsight; JSON-ready."""
    found: dict[str, Any] = {}
    with without_collector():
        for policy in policies:
            sent = run_sessions(sessions, setup.under(replace(setup.scheduling, eviction_policy=policy)))
            found[policy] = figures_of(sent).as_json()
            if policy == LRU:
                found[HINDSIGHT] = hindsight(
                    [one.turn for one in sent], setup.limits.num_blocks, setup.limits.block_size)
    return found


# -- hindsight ---------------------------------------------------------------------------------------------------------


def hindsight(turns: Sequence[Turn], num_blocks: int, block_size: int) -> dict[str, float]:
    """Returns the most prompt tokens that any order finds of these turns, sent one after the other."""
    chains = [list(_chain(turn, block_size)) for turn in turns]
    uses: dict[int, list[int]] = {}
    for at, chain in enumerate(chains):
        for block in chain:
            uses.setdefault(block, []).append(at)
    for times in uses.values():
        times.reverse()  # the next one is the last
    kept: dict[int, int] = {}  # by block: its next use, by which its entry in `order` is told from older ones
    order: list[tuple[int, int, int]] = []  # a heap: next use and position, negative, and block
    found = 0
    for turn, chain in zip(turns, chains, strict=True):
        most = (turn.num_prompt - 1) // block_size  # the last token is always computed
        held = 0
        while held < most and chain[held] in kept:
            held += 1
        found += held
        for position, block in enumerate(chain):
            later = uses[block]
            later.pop()
            if not later:
                kept.pop(block, None)
                continue
            kept[block] = later[-1]
            heappush(order, (-later[-1], -position, block))
        while len(kept) > num_blocks:
            use, _, block = heappop(order)
            if kept.get(block) == -use:
                del kept[block]
    total = sum([turn.num_prompt for turn in turns])
    return {"prompt_tokens": total, "found": found * block_size, "computed": total - found * block_size,
            "found_share": found * block_size / total}


def working_set(sessions: Sequence[Session], block_size: int) -> int:
    """Returns the number of different blocks of all prompts and outputs."""
    return len({block for session in sessions for turn in session.turns for block in _chain(turn, block_size)})


def _chain(turn: Turn, block_size: int) -> Iterator[int]:
    """Yields an id for each full block of a turn's prompt and output, equal for equal contents of all before it."""
    tokens, before = (*turn.prompt_ids, *turn.output_ids[:-1]), 0
    for start in range(0, len(tokens) - block_size + 1, block_size):
        before = hash((before, tokens[start : start + block_size]))
        yield before
