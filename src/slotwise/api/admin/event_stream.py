"""`GET /events`: the event log of this server, as it is written; each subscriber sees only what its tenant may."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from http import HTTPStatus

from slotwise.api.generate.context import Observers, ServedEngine, ServerClients
from slotwise.api.http.api_errors import bad_request
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.core.params import SamplingSpec
from slotwise.core.record import ReceivedBlocks, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add
from slotwise.observe import event_log
from slotwise.observe.event_log import Entry, Gap, encode_lines
from slotwise.observe.ring import Line, Ring

SWITCHES = ("backlog", "follow")  # 0 or 1; default 1
EVERY = 0.1  # seconds between two polls of the ring
MOST = 64  # entries encoded at a time: a millisecond or two in which no other stream is served
BACKLOG = 5 << 20  # bytes of the latest entries; about 2,000 steps of 64 rows, as many as a page shows smoothly
UNREAD = 10.0  # seconds a subscriber has to read what was written, beyond what sockets and buffers hold
MAX_UNSENT = 128 << 10  # bytes of socket buffer per subscriber
NDJSON = b"application/x-ndjson"

logger = logging.getLogger(__name__)


class TenantFilter:
    """Shows other tenants' requests with lengths and slots, but without names and tokens.

    Args:
        tenant: the subscriber's.  Empty where all are one; only the salts are hidden then.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._own: set[int] = set()  # numbers of its unfinished requests

    def line(self, line: Line) -> bytes:
        """A line of the log as the subscriber may see it."""
        if line.kind is event_log.RequestEntry or (line.kind is StepRecord and self._tenant):
            return event_log.line_of(self.before(event_log.decode(line.data)))
        return line.data

    def before(self, entry: event_log.Entry) -> event_log.Entry:
        """`entry` as the subscriber may see it.  Entries must come in the order of the log."""
        if isinstance(entry, event_log.RequestEntry):
            return self._request(entry)
        if isinstance(entry, StepRecord) and self._tenant:
            return self._step(entry)
        return entry

    def _request(self, entry: event_log.RequestEntry) -> event_log.RequestEntry:
        spec = entry.spec
        if not self._tenant or spec.salt.partition(":")[0] == self._tenant:
            self._own.add(entry.number)
            is_public = not (spec.salt or spec.slo.tenant or spec.session or entry.pieces)
            return entry if is_public else entry.replace_spec(spec.public())
        hidden = RequestSpec((), SamplingSpec(max_tokens=spec.params.max_tokens))
        return event_log.RequestEntry(entry.ns, entry.num_prompt, Add(entry.number, hidden, entry.timing))

    def _step(self, record: StepRecord) -> StepRecord:
        own, result, outcome, inputs = self._own, record.result, record.outcome, record.inputs
        ids = record.plan.request_ids
        tokens = None if outcome.tokens is None else self._covered(ids, outcome.tokens)
        ended = tuple([end if end.request_id in own else end._replace(message="") for end in outcome.ended])
        objections = () if any(result.objections) else result.objections
        plans = tuple([plan._replace(
            drafts=self._covered(plan.request_ids, plan.drafts),
            lookups=tuple([one for one in plan.lookups if one.request_id in own]))
            if plan.lookups or plan.drafts else plan for plan in record.plans])
        if inputs.compiled or inputs.arrivals or inputs.acknowledged or inputs.disk:
            inputs = inputs._replace(
                compiled=tuple([one if one.request_id in own else one._replace(objection="")
                                for one in inputs.compiled]),
                arrivals=self._unexplained(inputs.arrivals),
                acknowledged=("",) * len(inputs.acknowledged),
                disk=inputs.disk and inputs.disk._replace(arrivals=self._unexplained(inputs.disk.arrivals)))
        seen = record._replace(
            plans=plans,
            result=result._replace(tokens=self._covered(ids, result.tokens), forced=self._covered(ids, result.forced),
                                   drafts=self._covered(ids, result.drafts), objections=objections),
            outcome=outcome._replace(tokens=tokens, ended=ended), inputs=inputs)
        own.difference_update([end.request_id for end in ended])
        return seen

    def _covered(self, ids: Sequence[int], tokens: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """The tokens of rows, with zeros for those of others.  Args: tokens: () where no row has any."""
        own = self._own
        return tuple([row if number in own else (0,) * len(row) for number, row in zip(ids, tokens, strict=False)])

    def _unexplained(self, arrivals: Sequence[ReceivedBlocks]) -> tuple[ReceivedBlocks, ...]:
        return tuple([one if one.request_id in self._own else one._replace(failure="") for one in arrivals])


@about(media_type="application/x-ndjson", statuses=(HTTPStatus.TOO_MANY_REQUESTS,), query=tuple(
    {"name": name, "schema": {"enum": ["0", "1"], "default": "1"}} for name in SWITCHES))
async def events(clients: ServerClients, engine: ServedEngine, observers: Observers, exchange: HttpExchange) -> None:
    """Stream the event log: one JSON object per line (see observe.event_log).

    Begins with the latest entries of the ring, or with `backlog=0` with the unfinished requests.  Ends with the
    server, or with `follow=0` after the entries written so far.
    """
    switches = _switches(exchange)
    observers.batched_observer.flush()
    view = _View(observers.recorder.ring, TenantFilter(clients.keys.scope_of(exchange.tenant)))
    gone = asyncio.Event()
    with clients.subscribers.entering(exchange.holder):
        if exchange.is_head:
            await exchange.event(b"", NDJSON)
            await exchange.close()
            return
        exchange.limit_unsent(MAX_UNSENT)
        exchange.end_at_eof()
        async with exchange.watched(gone.set):
            await _write_parts(exchange, view.opening() if switches["backlog"] else view.opening_now(), gone)
            while not gone.is_set():
                is_ending = not switches["follow"] or engine.is_over or (
                    engine.client.draining and engine.client.state != "busy")
                observers.batched_observer.flush()
                if await _write_parts(exchange, view.more(), gone):
                    continue
                if is_ending:
                    break
                await asyncio.sleep(EVERY)
            await exchange.close()


async def _write_parts(exchange: HttpExchange, parts: Iterator[bytes], gone: asyncio.Event) -> bool:
    """Writes `parts`, each encoded in a pass of the loop of its own.  Returns whether there were any."""
    some = False
    for lines in parts:
        if gone.is_set():
            break
        some = True
        await _write(exchange, lines, gone)
        await asyncio.sleep(0)  # a socket that accepts all at once would starve other tasks
    return some


async def _write(exchange: HttpExchange, lines: bytes, gone: asyncio.Event) -> None:
    """Write `lines`.  Disconnects a subscriber that leaves them unread for `UNREAD` seconds, and waits for `gone`."""
    try:
        async with asyncio.timeout(UNREAD):
            await exchange.event(lines, NDJSON)
    except TimeoutError:
        logger.warning("a subscriber of the events was disconnected: it read nothing for %g seconds", UNREAD)
        exchange.abort()
        await gone.wait()


def _switches(exchange: HttpExchange) -> dict[str, bool]:
    found = dict.fromkeys(SWITCHES, True)
    for name, value in exchange.query():
        if name in found:
            if value not in ("0", "1"):
                raise bad_request(f"{name} is 0 or 1", name)
            found[name] = value == "1"
    return found


class _View:
    """One subscriber's position in the ring.  The ring never waits for it."""

    def __init__(self, ring: Ring, tenant_filter: TenantFilter) -> None:
        self._ring = ring
        self._filter = tenant_filter
        self._position = 0

    def opening(self) -> Iterator[bytes]:
        """Entries that describe the state before the latest entries of the ring, in parts."""
        self._position = self._ring.latest(BACKLOG)
        return self._lines(self._ring.preface(self._position))

    def opening_now(self) -> Iterator[bytes]:
        """Entries that describe the unfinished requests, in parts."""
        self._position = self._ring.end
        return self._lines(self._ring.unfinished())

    def more(self) -> Iterator[bytes]:
        """A few lines that were not read yet, in parts; empty when there are none."""
        batch = self._ring.since(self._position, MOST)
        self._position = batch.position
        if batch.missed:  # first: it says whose requests the lines are
            yield from self._lines([Gap(batch.missed), *self._ring.preface(self._ring.first)])
        if batch.lines:
            yield b"".join(map(self._filter.line, batch.lines))

    def _lines(self, entries: Sequence[Entry]) -> Iterator[bytes]:
        for start in range(0, len(entries), MOST):
            yield encode_lines([self._filter.before(entry) for entry in entries[start : start + MOST]])
