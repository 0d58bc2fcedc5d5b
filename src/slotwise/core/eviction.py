"""Eviction orders: which cached block of the prefix cache is reallocated first when blocks run out.

A block is *cached* while it is published and no request references it.  `BlockPool` owns the references; an
`EvictionOrder` owns the cached blocks and their order.  Retention never reserves a block: every cached block counts as
available, and the orders differ only in which goes first.

    lru        the least recently used
    cost       the cheapest to compute again, aged by GreedyDual-Size (Cao and Irani, 1997): rank = level + seconds,
               and the level rises to the rank of what was evicted last
    hinted     those without a claim, least recently used first; then claimed ones, the cheapest first
    predicted  as hinted; a session claims its blocks for as long as its own past pauses predict, and what its
               sub-agents computed goes first once it goes on

Blocks are equally large, so seconds per byte are seconds per block.  They grow with the position in the prompt, because
later tokens attend to more.

A prefix is evicted after its continuation.  `lru` gets blocks in the order of their release, the last one of a sequence
first.  The other orders rank only *leaves*: cached blocks without a cached continuation, and a block becomes a leaf
when its last one goes.  A heap of leaves takes O(log n) a block; entries out of date are skipped.

    salt ◄── b0 ◄── b1 ◄── b2 ◄── b3      leaves: b3 and c2.  Evicting b3 makes b2 a leaf; b1 is one when b2 and c2
                     ▲                    have gone.
                     └───── c2

A claim ends at a time.  The hints of a tenant cover at most its share of the cache: if they would cover more,
the oldest are dropped.  Predictions are the server's own, and have no share.

Host memory and disk (`engine/kv_disk.py`) have orders of their own, of the same kind.  Host memory inherits the claim
on a block that is evicted from the device, and that claim covers the blocks before it, too, which follow later:

    device   b0 ◄── b1                      b1 is evicted next, although its claim has gone with b2
    host                 ◄── b2 (claimed)   covers b1 and b0 from their arrival on

The disk holds copies of blocks that may be on the device still, so it is given every claim as soon as it is made.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from slotwise.core.prefix_cache import NOWHERE, CachedBlock, Entry, PrefixCache
from slotwise.core.request import Request, State
from slotwise.core.scheduler_limits import COST, HINTED, LRU, OBEYING, SchedulerLimits
from slotwise.core.step_time import StepTimeModel, Work

UNCLAIMED = 0.0  # the rank of a leaf without a claim
OVER = -1.0  # the rank of a leaf that nothing is expected to continue: it goes before those without a claim
BELOW_HINTS = 1e12  # by which ranks of predictions, in seconds, are below those of hints
MAX_SESSIONS = 4096  # whose pauses are remembered; a new tenant's session replaces the oldest of the largest share
MAX_SESSIONS_OF_ONE = 1024  # of a tenant
MAX_SEQUENCES = 8  # of a session
PAUSES = 8  # of a session that are remembered, and OF_ALL of a tenant's sessions together
OF_ALL = 64
ENDING = 8  # blocks that end a prompt: a request that finds one of them continues its session
FEW = 2  # pauses of a session below which its tenant's say when it returns
HELD_SHARE = 0.9  # quantile of the pauses for which a session's blocks are held, and MARGIN times that
MARGIN = 1.25
LEAST_RETURNS = 0.5  # share of a tenant's ended requests that a session came back from, below which none are held
STALE = 64  # entries that a heap may have beyond twice those that count
CHUNK = 1024  # tokens of the chunk of a prompt that is priced, at most; at positions 0 and PRICED
PRICED = 4096
REPRICED = 256  # blocks priced between two readings of the step-time model


class Content(Protocol):
    """What a block holds, as orders see it; hashed by identity."""

    @property
    def before(self) -> Content | None:
        """The content that it continues; None: it begins a prompt, or that is not known."""
        ...

    @property
    def position(self) -> int:
        """Blocks before it in its prompt."""
        ...


class Tier(NamedTuple):
    """Device memory, host memory or disk, as an order of its blocks sees it."""

    total: int  # blocks
    content: Callable[[int], Content]  # what a block holds
    block_of: Callable[[Any], int]  # which block holds a content; NOWHERE: the tier does not have it
    groups: int = 1  # contents of a position
    is_below: bool = False  # a prefix may arrive after its continuation


class EvictionOrder(Protocol):
    """The cached blocks of a tier, in an order of eviction.  Deterministic: its owner sets `now`, in seconds."""

    prices_chunks: bool
    """The order reads predicted times of prompt chunks: the step-time model learns from every step that has one."""

    now: float

    claims: list[tuple[Content, Claim]] | None
    """Claims made since they were last read; None: they are not collected."""

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def add(self, block: int) -> None:
        """A published block lost its last reference."""
        ...

    def remove(self, block: int) -> None:
        """A cached block is referenced again, or its contents can no longer be found."""
        ...

    def pop(self) -> int:
        """Remove and return the block to evict.  The caller has checked that there is one."""
        ...

    def forget(self, cached: Content) -> None:
        """Contents that were published can no longer be found: claims on them end."""
        ...

    def inherit(self, cached: Content, claim: Claim) -> None:
        """Take over a claim from the order of the tier above."""
        ...

    def admitted(self, request: Request, found: Sequence[Entry]) -> None:
        """A request got its blocks, of which the prefix `found` was cached."""
        ...

    def released(self, request: Request) -> None:
        """A request is about to release all of its blocks."""
        ...

    def share_is(self, share: float) -> None:
        """Claims of one tenant may cover this share of the tier's blocks from here on."""
        ...


class LeastRecentlyUsed:
    """Cached blocks in the order of their release."""

    prices_chunks = False
    now = 0.0
    claims: list[tuple[Content, Claim]] | None = None

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()  # a plain dict scans past all removed from its front

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def forget(self, cached: Content) -> None: ...

    def inherit(self, cached: Content, claim: Claim) -> None: ...

    def admitted(self, request: Request, found: Sequence[Entry]) -> None: ...

    def released(self, request: Request) -> None: ...

    def share_is(self, share: float) -> None: ...


class Price:
    """The seconds in which a block would be computed again, relative to one at the beginning of a prompt."""

    def __init__(self, times: StepTimeModel, block_size: int, chunk: int) -> None:
        self._times = times
        self.block_size, self._chunk = block_size, chunk
        self._per_block = 0.0  # by which a block's price grows from one to the next
        self._left = 0

    def of(self, cached: Content) -> float:
        """Returns the price; 1 of every block while the model is untrained."""
        if not self._left:
            self._left = REPRICED
            first, later = (self._times.typical(Work(self._chunk, 1, 0, self._chunk * (start + (self._chunk + 1) / 2)))
                            for start in (0, PRICED))
            self._per_block = max(0.0, later / first - 1) * self.block_size / PRICED if first > 0 else 0.0
        self._left -= 1
        return 1.0 + self._per_block * cached.position


class Leaf(NamedTuple):
    rank: float
    use: int  # ties: the least recently used
    block: int


class Ranked:
    """Base of the orders that rank leaves."""

    prices_chunks = True
    claims: list[tuple[Content, Claim]] | None = None

    def __init__(self, tier: Tier, price: Price) -> None:
        self.now = 0.0
        self._tier = tier
        self._content, self._block_of = tier.content, tier.block_of
        self._price = price
        self._cached: dict[int, tuple[Content, Leaf]] = {}  # by block
        self._continued: dict[Content, int] = {}  # number of cached continuations; those without are left out
        self._leaves: list[Leaf] = []  # a heap
        self._uses = 0

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, block: int) -> bool:
        return block in self._cached

    def add(self, block: int) -> None:
        cached = self._content(block)
        self._uses += 1
        self._cached[block] = cached, Leaf(self._rank(cached), self._uses, block)
        if cached.before is not None:
            self._continued[cached.before] = self._continued.get(cached.before, 0) + 1
        if cached not in self._continued:
            self._push(block)

    def remove(self, block: int) -> None:
        cached, _ = self._cached.pop(block)
        if (before := cached.before) is None:
            return
        self._continued[before] -= 1
        if not self._continued[before]:
            del self._continued[before]
            if self._has(before):
                self._push(self._block_of(before))

    def pop(self) -> int:
        leaf = self._pop_leaf(self._leaves)
        if leaf is None:
            raise IndexError("every cached block has a cached continuation")
        self._evicted(leaf)
        self.remove(leaf.block)
        return leaf.block

    def forget(self, cached: Content) -> None: ...

    def inherit(self, cached: Content, claim: Claim) -> None: ...

    def admitted(self, request: Request, found: Sequence[Entry]) -> None: ...

    def released(self, request: Request) -> None: ...

    def share_is(self, share: float) -> None: ...

    def _rank(self, cached: Content) -> float:
        """Returns the rank of a block that becomes cached; the smallest is evicted first."""
        raise NotImplementedError

    def _evicted(self, leaf: Leaf) -> None:
        """A leaf is about to be evicted."""

    def _has(self, cached: Content) -> bool:
        """Whether it is in one of the blocks of this order."""
        return self._cached.get(self._block_of(cached), (None,))[0] is cached

    def _push(self, block: int) -> None:
        """Rank a cached block that is a leaf."""
        self._push_leaf(self._leaves, self._cached[block][1])

    def _push_leaf(self, heap: list[Leaf], leaf: Leaf) -> None:
        heappush(heap, leaf)
        if len(heap) > 2 * len(self._cached) + STALE:
            heap[:] = set(filter(self._counts, heap))
            heapify(heap)

    def _pop_leaf(self, heap: list[Leaf]) -> Leaf | None:
        while heap:
            leaf = heappop(heap)
            if self._counts(leaf):
                return leaf
        return None

    def _counts(self, leaf: Leaf) -> bool:
        """Whether the block is a leaf still, and was not referenced meanwhile."""
        cached, latest = self._cached.get(leaf.block, (None, None))
        return cached is not None and latest is not None and latest.use == leaf.use and cached not in self._continued


class LeastRecentlyUsedLeaf(Ranked):
    """The least recently used leaf first, in a tier whose blocks arrive and are used prefixes first."""

    prices_chunks = False

    def _rank(self, cached: Content) -> float:
        return UNCLAIMED


class CheapestFirst(Ranked):
    """Evicts what is cheapest to compute again, aged by GreedyDual-Size."""

    _level = 0.0

    def _rank(self, cached: Content) -> float:
        return self._level + self._price.of(cached)

    def _evicted(self, leaf: Leaf) -> None:
        self._level = max(self._level, leaf.rank)


class Claim(NamedTuple):
    until: float  # seconds
    rank: float  # among claimed blocks the smallest is evicted first
    tenant: str
    is_hint: bool  # a client's; else a prediction, which a later one replaces
    first: int = 0  # of a sequence that is over: the position of the first block that is its own


class Cover:
    """A block that claims protect, as the block claimed or one before it."""

    __slots__ = ("before", "count", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant  # it counts for the first that claims it
        self.count = 0  # its claim, and its continuations that are covered
        self.before: Content | None = None  # which it covers


class Retained(Ranked):
    """Evicts blocks without a claim first.

    A claim is on the last block of a sequence, and covers those before it, which are not leaves while it is cached.
    Once it is evicted, the blocks before it have no claim left: under pressure whole sequences go, one by one.

    Args:
        share: of the tier's blocks that claims of one tenant may cover.
        prefix: finds the blocks of requests.
        heir: the order of the tier below.
    """

    def __init__(self, tier: Tier, price: Price, share: float, prefix: PrefixCache,
                 heir: EvictionOrder | None = None) -> None:
        super().__init__(tier, price)
        self._prefix = prefix
        self._heir = heir
        self._most = int(tier.total * share)
        self._claims: dict[Content, Claim] = {}
        self._of_tenant: dict[str, OrderedDict[Content, None]] = {}  # claims, oldest first
        self._covers: dict[Content, Cover] = {}
        self._num_covered: Counter[str] = Counter()  # by tenant
        self._ends: list[tuple[float, int, Content]] = []  # a heap of claims' ends; entries may be out of date
        self._claimed: list[Leaf] = []  # a heap of leaves with claims; the others are in `_leaves`

    def pop(self) -> int:
        while self._ends and self._ends[0][0] <= self.now:
            end = heappop(self._ends)
            if self._is_end(end):
                self._unclaim(end[2])
        leaf = self._pop_leaf(self._leaves) or self._pop_leaf(self._claimed)
        if leaf is None:
            raise IndexError("every cached block has a cached continuation")
        cached = self._cached[leaf.block][0]
        claim = self._claims.get(cached)
        self.forget(cached)
        self.remove(leaf.block)
        if claim is None:
            return leaf.block
        if self._heir is not None:
            self._heir.inherit(cached, claim)
        if claim.rank == OVER and (before := cached.before) is not None:
            self._end_before(before, leaf, claim)
        return leaf.block

    def _end_before(self, before: Content, leaf: Leaf, claim: Claim) -> None:
        """Evict the block before an evicted one next, if its sequence is over and was the last to use it."""
        _, latest = self._cached.get(self._block_of(before), (None, None))
        if (latest is not None and before.position >= claim.first and before not in self._claims
                and before not in self._continued and latest.use - leaf.use <= self._tier.groups):
            self._set_claim(before, claim)

    def forget(self, cached: Content) -> None:
        claim = self._claims.pop(cached, None)
        if claim is None or not claim.is_hint:
            return
        claims = self._of_tenant[claim.tenant]
        del claims[cached]
        if not claims:
            del self._of_tenant[claim.tenant]
        self._uncover(cached)

    def released(self, request: Request) -> None:
        """Claim the published blocks of a request that is to be retained, as far as its tenant's share goes."""
        if not (seconds := request.spec.retain):
            return
        tenant, until = request.spec.slo.tenant, self.now + seconds
        end = min(request.block_hashes.length, self._most)
        if covered := request.spec.retain_tokens:
            end = min(end, covered // self._price.block_size)
        for cached in self._last_blocks(request, end):
            self._claim(cached, Claim(until, self._price.of(cached), tenant, is_hint=True))
            request.num_retained = end * self._price.block_size

    def inherit(self, cached: Content, claim: Claim) -> None:
        self._claim(cached, claim)

    def share_is(self, share: float) -> None:
        self._most = int(self._tier.total * share)
        for tenant in list(self._of_tenant):
            while self._num_covered[tenant] > self._most and (claims := self._of_tenant.get(tenant)):
                self._unclaim(next(iter(claims)))

    def _claim(self, cached: Content, claim: Claim) -> None:
        """Set a claim, unless a client's is on the block already that ends later, or has not ended."""
        known = self._claims.get(cached)
        if known is not None and known.is_hint and known.until > (claim.until if claim.is_hint else self.now):
            return
        if claim.is_hint:
            self._hint(cached, claim)
        else:
            self._set_claim(cached, claim)

    def _hint(self, cached: Content, claim: Claim) -> None:
        """Set a client's claim, and drop its tenant's oldest ones beyond the share."""
        self._set_claim(cached, claim)
        claims = self._of_tenant.setdefault(claim.tenant, OrderedDict())
        claims[cached] = None
        self._cover(cached, claim.tenant)
        while self._num_covered[claim.tenant] > self._most and len(claims) > 1:
            self._unclaim(next(iter(claims)))

    def _rank(self, cached: Content) -> float:
        return UNCLAIMED  # so the least recently used goes first

    def _counts(self, leaf: Leaf) -> bool:
        if not super()._counts(leaf):
            return False
        claim = self._claims.get(self._cached[leaf.block][0])
        return leaf.rank == (UNCLAIMED if claim is None else claim.rank)

    def _push(self, block: int) -> None:
        cached, leaf = self._cached[block]
        claim = self._claims.get(cached)
        if claim is None or claim.rank == OVER:
            self._push_leaf(self._leaves, leaf if claim is None else leaf._replace(rank=OVER))
        else:
            self._push_leaf(self._claimed, leaf._replace(rank=claim.rank))

    def _last_blocks(self, request: Request, length: int) -> list[CachedBlock]:
        """Returns, of each cache group, the last of the first `length` published blocks of `request`."""
        entry = self._prefix.published(request.block_hashes, length)
        return [] if entry is None else [cached for cached in entry.cached if cached.block != NOWHERE]

    def _set_claim(self, cached: Content, claim: Claim) -> None:
        if self.claims is not None:
            self.claims.append((cached, claim))
        self.forget(cached)
        self._claims[cached] = claim
        self._uses += 1
        heappush(self._ends, (claim.until, self._uses, cached))
        if len(self._ends) > 2 * len(self._claims) + STALE:
            self._ends = list(filter(self._is_end, self._ends))
            heapify(self._ends)
        self._push_again(cached)

    def _cover(self, cached: Content, tenant: str) -> None:
        """Count a claim on `cached`, and cover the blocks before it that were not."""
        block: Content | None = cached
        while block is not None and self._may_cover(block):
            cover = self._covers.get(block)
            if cover is not None:
                cover.count += 1
                return
            self._covers[block] = cover = Cover(tenant)
            cover.count = 1
            self._num_covered[tenant] += 1
            block = block.before
            cover.before = block if block is not None and self._may_cover(block) else None

    def _may_cover(self, cached: Content) -> bool:
        return self._tier.is_below or self._block_of(cached) != NOWHERE

    def _uncover(self, cached: Content) -> None:
        block: Content | None = cached
        while block is not None:
            cover = self._covers[block]
            cover.count -= 1
            if cover.count:
                return
            del self._covers[block]
            self._num_covered[cover.tenant] -= 1
            if not self._num_covered[cover.tenant]:
                del self._num_covered[cover.tenant]
            block = cover.before

    def _unclaim(self, cached: Content) -> None:
        self.forget(cached)
        self._push_again(cached)

    def _push_again(self, cached: Content) -> None:
        """Rank a block whose claim has changed, if it is a leaf."""
        if self._has(cached) and cached not in self._continued:
            self._push(self._block_of(cached))

    def _is_end(self, end: tuple[float, int, Content]) -> bool:
        claim = self._claims.get(end[2])
        return claim is not None and claim.until == end[0]


class Suspended(NamedTuple):
    """Requests of a session, each of which continued the one before."""

    tails: tuple[Entry, ...]  # the last blocks of the latest prompt, and of its output
    first: int  # blocks before the first of its own


class Session:
    """What is known of a session: when its last request ended, and its pauses before the ones that followed.

    A sub-agent's requests do not continue those of its caller, who waits meanwhile.  So the sequences of a session form
    a stack, and when one goes on, those above it are over.
    """

    __slots__ = ("ended_at", "pauses", "sequences")

    def __init__(self) -> None:
        self.ended_at = -1.0  # seconds; negative: a request of it runs
        self.pauses: deque[float] = deque(maxlen=PAUSES)
        self.sequences: list[Suspended] = []

    def resume(self, found: Sequence[Entry]) -> list[Suspended]:
        """Removes and returns the sequence that a request with this cached prefix continues, and those above it."""
        for depth in reversed(range(len(self.sequences))):
            if any(tail.position < len(found) and found[tail.position] is tail
                   for tail in self.sequences[depth].tails):
                resumed = self.sequences[depth:]
                del self.sequences[depth:]
                return resumed
        return []

    def suspend(self, sequence: Suspended) -> None:
        self.sequences.append(sequence)
        del self.sequences[:-MAX_SEQUENCES]


class Sessions:
    """The sessions of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.known: OrderedDict[str | int, Session] = OrderedDict()
        self.pauses: deque[float] = deque(maxlen=OF_ALL)
        self.num_ended = 0.0  # requests, older ones counting less
        self.num_returned = 0.0

    def held_for(self, session: Session) -> tuple[float, float]:
        """Returns for how many seconds the blocks of a session that pauses are held, and when it is expected back."""
        pauses = session.pauses
        if len(pauses) < FEW:
            if not pauses and self.num_returned < LEAST_RETURNS * self.num_ended:
                return 0.0, 0.0
            pauses = self.pauses
        if not pauses:
            return 0.0, 0.0
        ordered = sorted(pauses)
        return MARGIN * ordered[int(HELD_SHARE * (len(ordered) - 1))], ordered[len(ordered) // 2]


FADED = 0.98  # weight of a tenant's earlier ends, at each


class PredictedReturns(Retained):
    """Evicts blocks of sessions last that are expected back, and of these the one expected last first.

    The longer a pause has lasted, the longer it will probably last: pauses of tools and people have heavy tails.  Where
    they are Lomax-distributed, what is left of one is proportional to its age plus a scale, here the session's median
    pause.  So the first to go is the one with the earliest release, less that median.

    A session is named by its requests (`RequestSpec.session`), or known by its prefix: one of the last blocks of the
    prompt, or the last of the output, of the request before.
    """

    def __init__(self, tier: Tier, price: Price, share: float, prefix: PrefixCache,
                 heir: EvictionOrder | None = None) -> None:
        super().__init__(tier, price, share, prefix, heir)
        self._tenants: OrderedDict[str, Sessions] = OrderedDict()  # least recently used first
        self._num_sessions = 0
        self._tails: OrderedDict[int, tuple[str, str | int]] = OrderedDict()  # by number of an entry
        self._of_request: dict[int, str | int] = {}  # of requests with blocks
        self._firsts: dict[int, int] = {}  # of these: blocks that its sequence shares with others
        self._unnamed = 0

    def admitted(self, request: Request, found: Sequence[Entry]) -> None:
        spec, name = request.spec, self._name(request, found)
        self._of_request[request.request_id] = name
        sessions = self._tenants.get(spec.slo.tenant)
        session = sessions.known.get(name) if sessions is not None else None
        firsts = self._firsts
        firsts[request.request_id] = len(found)
        if session is not None and (resumed := session.resume(found)):
            firsts[request.request_id] = resumed[0].first
            for sequence in resumed[1:]:
                self._end_sequence(sequence)
        if sessions is not None and request.state is State.PREEMPTED:
            sessions.num_ended -= 1  # it had not ended
        elif sessions is not None and session is not None and session.ended_at >= 0:
            pause = max(0.0, request.arrived_at - session.ended_at)
            session.pauses.append(pause)
            sessions.pauses.append(pause)
            sessions.num_returned += 1
            session.ended_at = -1.0

    def released(self, request: Request) -> None:
        tenant, name = request.spec.slo.tenant, self._of_request.pop(request.request_id, None)
        super().released(request)
        if name is None:
            return
        sessions = self._sessions(tenant)
        session = self._session(sessions, name)
        session.ended_at = self.now
        sessions.num_ended = sessions.num_ended * FADED + 1
        sessions.num_returned *= FADED
        tails = self._tails_of(request)
        session.suspend(Suspended(tails, self._firsts.pop(request.request_id, 0)))
        for tail in tails if isinstance(name, int) else ():
            self._tails[tail.number] = tenant, name
            self._tails.move_to_end(tail.number)
        while len(self._tails) > (ENDING + 1) * MAX_SESSIONS:
            self._tails.popitem(last=False)
        held, expected = sessions.held_for(session)
        if held > 0:
            claim = Claim(self.now + held, self.now - expected - BELOW_HINTS, tenant, is_hint=False)
            for cached in self._last_blocks(request, request.block_hashes.length):
                self._claim(cached, claim)

    def _name(self, request: Request, found: Sequence[Entry]) -> str | int:
        if request.spec.session:
            return request.spec.session
        tenant, name = self._tails.get(found[-1].number, ("", None)) if found else ("", None)
        if name is not None and tenant == request.spec.slo.tenant:
            return name
        self._unnamed += 1
        return self._unnamed

    def _tails_of(self, request: Request) -> tuple[Entry, ...]:
        """Returns the entries that end its prompt, and the one that ends all of its published tokens.

        A chat's next prompt repeats this one but for its last tokens, so several blocks end it.
        """
        length = request.block_hashes.length
        end = min(length, request.num_prompt // self._price.block_size)
        ends = sorted({*range(max(1, end - ENDING + 1), end + 1), length})
        found = [self._prefix.published(request.block_hashes, end) for end in ends]
        return tuple([entry for entry in found if entry is not None])

    def _end_sequence(self, sequence: Suspended) -> None:
        """Evict the blocks of a sequence first: its session goes on without it."""
        for tail in sequence.tails[-1:]:
            for cached in tail.cached:
                if cached.block != NOWHERE:
                    self._claim(cached, Claim(inf, OVER, "", is_hint=False, first=sequence.first))

    def add(self, block: int) -> None:
        cached = self._content(block)
        if (claim := self._claims.get(cached)) is not None and claim.rank == OVER:
            self.forget(cached)  # it was continued all the same
        super().add(block)

    def _sessions(self, tenant: str) -> Sessions:
        sessions = self._tenants.get(tenant)
        if sessions is None:
            sessions = self._tenants[tenant] = Sessions()
        self._tenants.move_to_end(tenant)
        return sessions

    def _session(self, sessions: Sessions, name: str | int) -> Session:
        """Returns a tenant's session; a new one may replace the tenant's oldest, or that of the longest idle tenant."""
        known = sessions.known
        if name not in known:
            if len(known) >= MAX_SESSIONS_OF_ONE:
                known.popitem(last=False)
                self._num_sessions -= 1
            while self._num_sessions >= MAX_SESSIONS:
                idle, others = next(iter(self._tenants.items()))
                if others.known:
                    others.known.popitem(last=False)
                    self._num_sessions -= 1
                if not others.known and others is not sessions:
                    del self._tenants[idle]
            known[name] = Session()
            self._num_sessions += 1
        known.move_to_end(name)
        return known[name]


class EvictionOrders(NamedTuple):
    """The orders of device and host memory."""

    device: EvictionOrder
    host: EvictionOrder


def eviction_orders(limits: SchedulerLimits, prefix: PrefixCache, on_host: Callable[[int], CachedBlock],
                    times: StepTimeModel) -> EvictionOrders:
    """Returns the orders that `limits.eviction_policy` names.

    Args:
        on_host: returns what a host block holds.
        times: prices blocks.
    """
    if limits.eviction_policy == LRU:
        return EvictionOrders(LeastRecentlyUsed(), LeastRecentlyUsed())
    groups = len(limits.groups)
    device = Tier(limits.num_blocks, prefix.content, attrgetter("block"), groups)
    host = Tier(limits.num_host_blocks, on_host, attrgetter("host_block"), groups, is_below=True)
    below = order_below(limits, host, prefix, times)
    if limits.eviction_policy not in OBEYING:
        return EvictionOrders(order_below(limits, device, prefix, times), below)
    kind = Retained if limits.eviction_policy == HINTED else PredictedReturns
    return EvictionOrders(kind(device, _price(limits, times), limits.tenant_cache_share, prefix,
                               below if host.total else None), below)


def order_below(limits: SchedulerLimits, tier: Tier, prefix: PrefixCache, times: StepTimeModel) -> EvictionOrder:
    """Returns the order of a tier that is not given requests; claims are made elsewhere, and inherited."""
    if limits.eviction_policy == LRU:
        return LeastRecentlyUsedLeaf(tier, _price(limits, times))
    if limits.eviction_policy == COST:
        return CheapestFirst(tier, _price(limits, times))
    return Retained(tier, _price(limits, times), limits.tenant_cache_share, prefix)


def _price(limits: SchedulerLimits, times: StepTimeModel) -> Price:
    return Price(times, limits.block_size, min(limits.max_num_batched_tokens, CHUNK))
