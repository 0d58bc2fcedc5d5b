"""Why each span of a prompt was found in the prefix cache, or had to be computed.

    tokens   | 0 .......... 63 | 64 ......................... 575 | 576 .. 580 |      block_size 16
    cause    | found           | diverged, at token 71            | last_block |
    nearest  | the same tokens | 7 more equal tokens, then others |

A request's spans are made once, in the plan that admits it, before its blocks are allocated.  Only the first block that
was not found needs a cause of its own: what follows a missing block could not have been used.  Costs are a dictionary
look-up for each evicted block, and a comparison with the latest `MAX_SIBLINGS` entries after the last one found.

Evicted blocks are remembered without their tokens: digest, time, and the request that got the block; at most
`REMEMBERED` times as many as the cache has blocks.  What belongs to another tenant is never named: entries are compared
within one salt, other salts are those of the same owner, and a request of another tenant that evicted a block has no
number here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slotwise.core import cache_causes
from slotwise.core.prefix_cache import BlockHashes, Entry, PrefixCache
from slotwise.core.record import ANOTHER_REQUEST, PromptSpan
from slotwise.core.request import Namespace, Request

REMEMBERED = 4  # evicted blocks per block of the cache: what is evicted four times over is forgotten
MAX_SIBLINGS = 16  # cached prompts that are compared at the block at which a prompt is not found any further
MAX_SALTS = 16  # other salts of an owner in which a prompt is looked up
MAX_OWNERS, MAX_DIVERGENCES = 64, 32  # that have remembered divergences, and how many each
AROUND = 24  # tokens shown on each side of a divergence
COMPARED = 512  # tokens after a divergence that are compared
SHINGLE = 8  # tokens in sequence that count as the same text


class Eviction(NamedTuple):
    """A cached block that was given to another request."""

    at: float  # seconds
    request_id: int  # the request that got the block
    tenant: str  # of that request
    salt: str  # of the block


class Divergence(NamedTuple):
    """Where a request's prompt left the nearest cached one."""

    request_id: int
    offset: int  # tokens of `nearest` that are the same
    nearest: Entry
    digests: tuple[int, ...]  # the request's own blocks from there on


@dataclass(frozen=True, slots=True)
class DivergedTokens:
    """The tokens around a divergence, as far as they are still cached."""

    request_id: int
    before: tuple[int, ...] = ()  # that both prompts have
    own: tuple[int, ...] = ()  # the request's, from the divergence on
    nearest: tuple[int, ...] = ()  # the nearest cached prompt's, from the divergence on
    num_compared: int = 0  # tokens of the request after the divergence
    num_same: int = 0  # of these, those in a run of at least `SHINGLE` tokens that the nearest prompt has there, too


class PromptLookup:
    """Finds the causes of misses; remembers evicted blocks and the latest divergences.

    Args:
        num_blocks: of the cache, on the device and on the host.
    """

    def __init__(self, prefix: PrefixCache, block_size: int, num_blocks: int) -> None:
        self._prefix = prefix
        self._block_size = block_size
        self._capacity = REMEMBERED * num_blocks
        self._evicted: OrderedDict[int, Eviction] = OrderedDict()  # by digest, the oldest first
        self._diverged: OrderedDict[str, deque[Divergence]] = OrderedDict()  # by owner, the latest last

    def evicted(self, entry: Entry, request: Request, now: float) -> None:
        """A block of `entry` was given to `request`."""
        evicted = self._evicted
        evicted.pop(entry.digest, None)
        evicted[entry.digest] = Eviction(now, request.request_id, request.spec.slo.tenant, entry.salt)
        if len(evicted) > self._capacity:
            evicted.popitem(last=False)

    # -- the spans of a prompt -----------------------------------------------------------------------------------

    def missed(self, request: Request, found: Sequence[Entry]) -> list[PromptSpan]:
        """Returns the spans of a request's known tokens after the blocks `found`, which are its cached prefix."""
        size, num_tokens = self._block_size, len(request.tokens)
        num_full = (num_tokens - 1) // size  # blocks that a lookup may find
        if not num_full:
            return [PromptSpan(num_tokens, cache_causes.TOO_SHORT if num_tokens < size else cache_causes.LAST_BLOCK)]
        spans = self._causes(request, found, num_full) if len(found) < num_full else []
        spans.append(PromptSpan(num_tokens, cache_causes.LAST_BLOCK))
        return spans

    def _causes(self, request: Request, found: Sequence[Entry], num_full: int) -> list[PromptSpan]:
        hashes, end = request.block_hashes, num_full * self._block_size
        spans = self._lost(request, found, num_full)
        if spans and spans[-1].end == end:
            return spans
        if not spans and not found:
            spans = self._elsewhere(hashes, request.tokens, num_full)
        if not spans and (span := self._divergence(request, found, num_full)) is not None:
            return [span]
        if not spans or spans[-1].end < end:
            spans.append(PromptSpan(end, cache_causes.NEW))
        return spans

    def _lost(self, request: Request, found: Sequence[Entry], num_full: int) -> list[PromptSpan]:
        """Returns the spans after `found` that were cached: they are evicted, or a plan may not load them."""
        hashes, size, spans = request.block_hashes, self._block_size, list[PromptSpan]()
        before: int | str | None = found[-1].number if found else hashes.salt  # None: the chain is broken
        for index in range(len(found), num_full):
            digest, end = self._prefix.digest(hashes, request.tokens, index), (index + 1) * size
            entry, eviction = self._prefix.with_digest(digest), self._evicted.get(digest)
            if entry is None or before is None or not entry.holds(hashes.parts[index], before):
                entry = before = None
            else:
                before = entry.number
            if entry is not None and entry.is_whole:
                span = PromptSpan(end, cache_causes.LOAD_LIMIT)
            elif eviction is not None and eviction.salt == hashes.salt:
                span = self._span(end, eviction, request)
            else:
                break
            if spans and (spans[-1].cause, spans[-1].request_id) == (span.cause, span.request_id):
                spans[-1] = spans[-1]._replace(end=end)
            else:
                spans.append(span)
        return spans

    def _span(self, end: int, eviction: Eviction, request: Request) -> PromptSpan:
        if eviction.tenant == request.spec.slo.tenant:
            return PromptSpan(end, cache_causes.EVICTED, eviction.at, eviction.request_id)
        return PromptSpan(end, cache_causes.EVICTED, float(round(eviction.at)), ANOTHER_REQUEST)

    def _elsewhere(self, hashes: BlockHashes, tokens: Sequence[int], num_full: int) -> list[PromptSpan]:
        """Returns the longest prefix that is cached under another salt of the same owner."""
        own, most, cause = Namespace.of(hashes.salt), 0, ""
        for salt in self._prefix.other_salts(hashes, MAX_SALTS):
            length, other = self._prefix.num_under(salt, hashes, tokens, num_full), Namespace.of(salt)
            is_reset = (other.adapter, other.salt) == (own.adapter, own.salt)
            if length > most or (length == most and is_reset):
                most = length
                cause = (cache_causes.RESET if is_reset else
                         cache_causes.OTHER_SALT if other.adapter == own.adapter else cache_causes.OTHER_ADAPTER)
        return [PromptSpan(most * self._block_size, cause)] if most else []

    def _divergence(self, request: Request, found: Sequence[Entry], num_full: int) -> PromptSpan | None:
        """Returns the span in which a prompt leaves the nearest cached one, after `found`; None: none is near."""
        hashes, size, index = request.block_hashes, self._block_size, len(found)
        parent = found[-1] if found else self._prefix.root(hashes.salt)
        if parent is None:
            return None
        part, nearest, offset = hashes.parts[index], None, -1
        for child in parent.children(MAX_SIBLINGS):
            if child.tokens[: offset + 1] == part[: offset + 1]:  # it has more of the same tokens
                nearest, offset = child, _num_equal(part, child.tokens)
        if nearest is None or index + offset == 0:
            return None
        last = min(num_full, index + -(-COMPARED // size))
        self._remember(hashes.owner, Divergence(request.request_id, offset, nearest, tuple(
            [self._prefix.digest(hashes, request.tokens, at) for at in range(index, last)])))
        return PromptSpan(num_full * size, cache_causes.DIVERGED, position=index * size + offset)

    # -- the text around a divergence ----------------------------------------------------------------------------

    def _remember(self, owner: str, divergence: Divergence) -> None:
        latest = self._diverged.pop(owner, None)
        self._diverged[owner] = latest = deque(maxlen=MAX_DIVERGENCES) if latest is None else latest
        latest.append(divergence)
        if len(self._diverged) > MAX_OWNERS:
            self._diverged.popitem(last=False)

    def diverged(self, request_ids: Iterable[int]) -> list[DivergedTokens]:
        """Returns the tokens around the divergences of these requests that are remembered and still cached."""
        wanted = frozenset(request_ids)
        return [self._tokens(one) for latest in self._diverged.values() for one in latest if one.request_id in wanted]

    def _tokens(self, one: Divergence) -> DivergedTokens:
        if not self._prefix.has_entry(one.nearest):
            return DivergedTokens(one.request_id)
        parent = one.nearest.parent
        before = (*(parent.tokens if parent is not None else ()), *one.nearest.tokens[: one.offset])
        nearest, entry = list[int](), one.nearest
        while True:
            nearest += entry.tokens
            if len(nearest) >= COMPARED or entry.latest_child is None:
                break
            entry = entry.latest_child
        own: list[int] = []
        for digest in one.digests:
            found = self._prefix.with_digest(digest)
            if found is None or found.salt != one.nearest.salt:
                break
            own += found.tokens
        own, nearest = own[one.offset :], nearest[one.offset :]
        return DivergedTokens(
            one.request_id, before[-AROUND:], tuple(own[:AROUND]), tuple(nearest[:AROUND]), len(own),
            _num_same(own, nearest))


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _num_same(own: Sequence[int], nearest: Sequence[int]) -> int:
    """How many tokens of `own` are in a run of `SHINGLE` tokens that `nearest` has, too, wherever it stands."""
    known = {tuple(nearest[at : at + SHINGLE]) for at in range(len(nearest) - SHINGLE + 1)}
    num_same = covered = 0
    for at in range(len(own) - SHINGLE + 1):
        if tuple(own[at : at + SHINGLE]) in known:
            num_same += at + SHINGLE - max(covered, at)
            covered = at + SHINGLE
    return num_same
