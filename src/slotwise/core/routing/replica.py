"""A replica as its router knows it: its last report, and what was sent to it since.

    report  |── index, load, step times ──|                        once or twice a second
    sent                                  |── requests ──────►|    known at once

Requests without an output will have their prompts computed there, so their pieces count as cached from the moment they
are sent; a report requested after a request's first output says whether they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slotwise.core.routing.prompt import RoutedRequest
from slotwise.core.step_time import Work


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica reports of itself."""

    slots: int  # requests that run at once
    step_tokens: int = 1  # token budget of a step
    num_running: int = 0
    num_waiting: int = 0
    starts_per_second: float = 0.0  # requests that leave its queue for a slot; 0: not measured
    prefill_rate: float = 0.0  # prompt tokens per second while its rows decode; 0: not known
    piece_tokens: float = 0.0  # tokens of a piece of its prompts; 0: not measured
    adapters: tuple[str, ...] = ()  # those that requests may name there
    max_loras: int = 1  # adapters among the rows of a step
    sends_prompts: bool = False  # it computes prompts for other replicas
    receives_prompts: bool = False  # it takes prompts that others have computed
    kv_host: str = ""  # where other replicas request its prompts
    kv_port: int = 0  # of `kv_host`

    @property
    def serves(self) -> bool:
        """Whether requests are sent to it to be answered, and not for their prompts alone."""
        return self.receives_prompts or not self.sends_prompts


@dataclass(slots=True)
class _SentRequest:
    """A request that has not ended."""

    request: RoutedRequest
    new_tokens: float  # of its prompt, not in the cache when it was sent
    at: float  # seconds
    has_output: bool = False


@dataclass(slots=True)
class Replica:
    """Its own state and changes are the fleet's: routers only read it."""

    name: str
    is_up: bool = True
    is_draining: bool = False
    report: Report = field(default_factory=lambda: Report(slots=1))
    adapters: frozenset[str] = frozenset()  # those that requests may name there
    _adapters_at: float = 0.0  # seconds; reports requested before are older than `adapters`
    _unfinished: dict[str, _SentRequest] = field(default_factory=dict)
    _cached: set[int] = field(default_factory=set)  # pieces, as reported
    _coming: Counter[int] = field(default_factory=Counter)  # pieces of requests without an output
    _fresh: dict[int, float] = field(default_factory=dict)  # pieces computed since, and when
    _with: Counter[str] = field(default_factory=Counter)  # unfinished requests sent, by adapter
    _queued: float = 0.0  # new tokens of requests without an output
    _others: int = 0  # requests that it reported beyond those sent
    _most: int = 0  # unfinished ones among those sent, at most since the last report

    # -- what routers read ---------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Requests that run or wait there: those sent, and those of others that it has reported."""
        return len(self._unfinished) + self._others

    @property
    def num_sent(self) -> int:
        """Requests sent that have not ended."""
        return len(self._unfinished)

    @property
    def queued_tokens(self) -> float:
        """Prompt tokens sent that it has yet to compute."""
        return self._queued

    def hit(self, request: RoutedRequest) -> int:
        """Pieces of the request's prompt that it has, or will have computed."""
        for count, piece in enumerate(request.digests):
            if piece not in self._cached and piece not in self._coming and piece not in self._fresh:
                return count
        return len(request.digests)

    def new_tokens(self, request: RoutedRequest) -> float:
        """Tokens of the request's prompt that it would compute."""
        return max(1.0, request.num_tokens - self.hit(request) * request.piece_tokens)

    def has(self, adapter: str) -> bool:
        """Whether requests may name an adapter there; "": the base model."""
        return not adapter or adapter in self.adapters

    def has_place(self, adapter: str) -> bool:
        """Whether a step may have an adapter in addition to those of the requests sent; else it waits for them."""
        return not adapter or adapter in self._with or len(self._with) < self.report.max_loras

    def lacked(self, request_id: str) -> float:
        """Tokens of the prompt of an unfinished request that it had yet to compute when the request was sent."""
        return self._unfinished[request_id].new_tokens

    @property
    def num_pieces(self) -> int:
        """Pieces that it has cached or is computing."""
        return len(self._cached) + len(self._coming) + len(self._fresh)

    def wait(self, request: RoutedRequest) -> float:
        """Predicted seconds until the request's first output; 0 while no step time and no queue is known."""
        behind = self.batch + 1 - self.report.slots
        starts = self.report.starts_per_second
        slot = behind / starts if behind > 0 and starts else 0.0
        rate = self.report.prefill_rate
        return slot + ((self._queued + self.new_tokens(request)) / rate if rate else 0.0)

    # -- what changes it -----------------------------------------------------------------------------------------

    def sent(self, request: RoutedRequest, now: float) -> None:
        new = self.new_tokens(request)
        self._unfinished[request.request_id] = _SentRequest(request, new, now)
        self._most = max(self._most, len(self._unfinished))
        self._coming.update(request.digests)
        self._queued += new
        if request.adapter:
            self._with[request.adapter] += 1

    def first_output(self, request_id: str, now: float) -> None:
        """Its prompt is computed.  Does nothing if the id is unknown, or had an output before."""
        sent = self._unfinished.get(request_id)
        if sent is not None and not sent.has_output:
            self._leave_queue(sent)
            self._fresh.update(dict.fromkeys(sent.request.digests, now))

    def finished(self, request_id: str) -> None:
        """Does nothing if the id is unknown."""
        if (sent := self._unfinished.pop(request_id, None)) is None:
            return
        if not sent.has_output:
            self._leave_queue(sent)
        if adapter := sent.request.adapter:
            self._with[adapter] -= 1
            if not self._with[adapter]:
                del self._with[adapter]

    def _leave_queue(self, sent: _SentRequest) -> None:
        sent.has_output = True
        for piece in sent.request.digests:
            self._coming[piece] -= 1
            if not self._coming[piece]:
                del self._coming[piece]
        self._queued = sum([other.new_tokens for other in self._unfinished.values() if not other.has_output])

    def update(self, report: Report, asked_at: float) -> None:
        """Applies a report that was requested at `asked_at`; `update_cache` has applied its index before.

        Where none waits, all requests sent before have started, even those whose outputs come only at their end.
        """
        self.report = report
        self._others = max(0, report.num_running + report.num_waiting - self._most)
        self._most = len(self._unfinished)
        if not report.num_waiting:
            for request_id, sent in self._unfinished.items():
                if sent.at < asked_at:
                    self.first_output(request_id, asked_at)
        self._fresh = {piece: since for piece, since in self._fresh.items() if since >= asked_at}
        if asked_at >= self._adapters_at:
            self.adapters = frozenset(report.adapters)

    def set_adapters(self, names: Iterable[str], now: float) -> None:
        """Sets the adapters that requests may name; reports requested before `now` do not change them."""
        self.adapters, self._adapters_at = frozenset(names), now

    def update_cache(self, added: Iterable[int], removed: Iterable[int] = (), *, is_whole: bool = False) -> None:
        """Changes the pieces that it has in its cache.  Args: is_whole: `added` are all of them."""
        if is_whole:
            self._cached.clear()
        self._cached.difference_update(removed)
        self._cached.update(added)

    def lost(self) -> list[str]:
        """It is gone, with its cache.  Returns the requests that had not ended."""
        unfinished = list(self._unfinished)
        for known in (self._unfinished, self._cached, self._coming, self._fresh, self._with):
            known.clear()
        self.adapters = frozenset()
        self.is_up, self._queued, self._others, self._most = False, 0.0, 0, 0
        return unfinished


def prefill_rate(predicted: Callable[[Work], float], step_tokens: int, num_running: int) -> float:
    """Prompt tokens per second in steps that use the whole budget and have the running rows, too.

    Args: predicted: the seconds of a step.
    """
    tokens = max(1, step_tokens - num_running)
    seconds = predicted(Work(tokens + num_running, num_running + 1, 0, tokens * (tokens + 1) / 2))
    return tokens / seconds if seconds > 0 else 0.0
