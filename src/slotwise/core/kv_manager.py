"""Block tables: the cache blocks that hold each request's keys and values, of each cache group.

    tokens   0 ........ 15 | 16 ....... 31 | 32 .. 40          block_size 16, 41 tokens scheduled
    blocks       [7]              [2]            [9]           capacity: 48 tokens
                 cached           cached         allocated     the first 32 tokens are shared with another request

Groups differ only in the blocks that they keep behind the computed tokens (`core/cache_groups.py`).  A prefix found
only in host memory (`core/host_cache.py`) needs a device block, too, into which the plan loads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from slotwise.core import cache_causes
from slotwise.core.block_pool import BlockPool, ConservationError
from slotwise.core.cache_groups import BlockTable, CacheGroups
from slotwise.core.host_cache import HostCache
from slotwise.core.kv_transfers import PinnedBlocks
from slotwise.core.prefix_cache import NOWHERE, CachedBlock, Entry, PrefixCache
from slotwise.core.prompt_lookup import PromptLookup
from slotwise.core.record import FREED, FreedBlocks, NewBlocks, PromptSpan
from slotwise.core.request import KVTransfer, Request

NEVER = 1 << 62  # tokens


class Allocation(NamedTuple):
    """Blocks for a waiting request: the cached prefix, and how many blocks must be allocated."""

    num_computed: int  # tokens that need not be computed
    found: list[Entry]  # cached prefix, in order
    used: list[list[CachedBlock]]  # by group, the blocks of `found` that it reads
    on_host: list[CachedBlock]  # those that are only in host memory
    ends: list[int]  # by group, the block before which its table ends
    num_missing: int


class KVManager:
    """Allocates the pool's blocks to requests.  Only this class changes `Request.tables`.

    Args:
        host: host-memory tier for evicted blocks.
        shares: enables prefix caching.
    """

    def __init__(self, num_blocks: int, groups: CacheGroups, host: HostCache, *, shares: bool) -> None:
        self.host = host
        self.prefix = PrefixCache(groups.block_size, groups.windows)
        self.prompts = PromptLookup(self.prefix, groups.block_size, num_blocks + host.total)
        self.pool = BlockPool(num_blocks, self.prefix.has)
        self.pinned = PinnedBlocks(self.pool)
        self.block_size = groups.block_size
        self._groups = groups
        self._shares = shares
        self._advances = shares or groups.are_windowed
        self.is_windowed = groups.are_windowed  # so requests may hold blocks for a part of their known tokens
        self.has_states = groups.have_states
        self.renews_prefixes = True  # False: evict as 0.2.0 did, whose logs are replayed (see `release`)
        self._freed: Counter[tuple[int, int]] = Counter()  # by slot and group: blocks truncated since the last plan
        self._expired: Counter[tuple[int, int]] = Counter()  # by slot and group: blocks that fell behind a window

    def missing(self, allocation: Allocation, leaving: Iterable[Request]) -> int:
        """Blocks to be freed before `allocation` fits once the requests `leaving` have left; below 1: it fits.

        A block that another request shares, or that the allocation contains, is not freed by a request that leaves.
        """
        kept = {cached.block for cached in chain(*allocation.used)}
        dropped = Counter(block for request in leaving for block in request.blocks if block not in kept)
        return self.num_lacking(allocation) - self.pool.num_freed(dropped)

    def num_lacking(self, allocation: Allocation) -> int:
        """Blocks to be freed before `allocation` fits; below 1: it fits."""
        idle = sum([self.pool.is_cached(cached.block) for cached in chain(*allocation.used)])
        return allocation.num_missing - (self.pool.num_available - idle)

    def match(self, request: Request, num_tokens: int) -> Allocation:
        """Returns what `num_tokens` tokens of a request need; of a prefix in host memory, what one plan may load.

        The cached prefix ends before the last known token, which must be computed to sample the next one.
        """
        if request.tables:  # it waited for them without a slot, and keeps them
            grown = [max(table.end, -(-num_tokens // self.block_size)) for table in request.tables]
            more = sum(grown) - sum([table.end for table in request.tables])
            return Allocation(request.num_computed, [], [[] for _ in grown], [], grown, more)
        computes_all = request.computes_whole_prompt and not request.num_output
        found = [] if computes_all or not self._shares else self.prefix.match(
            request.block_hashes, request.tokens, len(request.tokens) - 1, self.host.max_loads)
        used = self.prefix.used(found)
        on_host = [cached for cached in chain(*used) if cached.block == NOWHERE]
        ends = self._groups.ends(len(found), -(-num_tokens // self.block_size))
        missing = sum(ends) - len(ends) * len(found) + len(on_host)
        return Allocation(len(found) * self.block_size, found, used, on_host, ends, missing)

    def lookup(self, request: Request, allocation: Allocation) -> tuple[PromptSpan, ...]:
        """Returns why each span of a request's known tokens was found in the prefix cache, or was not.

        The request is about to get `allocation`: allocating evicts.
        """
        num_tokens = len(request.tokens)
        if request.tables and request.num_on_disk:
            return self._read_from_disk(request, allocation.num_computed)
        if request.tables:  # its prompt came from another engine
            found = allocation.num_computed - request.num_received
            spans = [PromptSpan(found, cache_causes.FOUND), PromptSpan(allocation.num_computed, cache_causes.RECEIVED),
                     PromptSpan(num_tokens, cache_causes.NEW)]
            return tuple([span for span, before in zip(spans, [0, *[one.end for one in spans]], strict=False)
                          if span.end > before])
        if not self._shares:
            return (PromptSpan(num_tokens, cache_causes.DISABLED),)
        if request.computes_whole_prompt and not request.num_output:
            return (PromptSpan(num_tokens, cache_causes.WHOLE_PROMPT),)
        return (*self._found(allocation), *self.prompts.missed(request, allocation.found))

    def _read_from_disk(self, request: Request, num_computed: int) -> tuple[PromptSpan, ...]:
        entries = self.prefix.chain(request.block_hashes, request.tokens, num_computed)
        in_memory = num_computed - request.num_received
        spans = [PromptSpan(in_memory, cache_causes.FOUND)] if in_memory else []
        spans += [PromptSpan(num_computed, cache_causes.FOUND_ON_DISK)] if request.num_received else []
        return (*spans, *self.prompts.missed(request, entries))

    def _found(self, allocation: Allocation) -> list[PromptSpan]:
        if not allocation.on_host:
            return [PromptSpan(allocation.num_computed, cache_causes.FOUND)] if allocation.found else []
        on_host = {id(cached.entry) for cached in allocation.on_host}
        spans: list[PromptSpan] = []
        for number, entry in enumerate(allocation.found, 1):
            cause = cache_causes.FOUND_IN_HOST if id(entry) in on_host else cache_causes.FOUND
            if spans and spans[-1].cause == cause:
                spans.pop()
            spans.append(PromptSpan(number * self.block_size, cause))
        return spans

    def allocate(self, request: Request, allocation: Allocation, now: float) -> int:
        """Set the block tables of `request`.  Returns its computed tokens, including those the plan will load."""
        num_computed, found, used, on_host, ends, num_missing = allocation
        if request.tables:
            more = iter(self._pop_blocks(num_missing, request, now))
            for table, end in zip(request.tables, ends, strict=True):
                table.blocks.extend(islice(more, end - table.end))
            request.num_reserved, request.capacity = max(ends), min(ends) * self.block_size
            return num_computed
        self.pool.share(cached.block for cached in chain(*used) if cached.block != NOWHERE)
        self.host.hold(on_host)  # evictions below may save to the host, but not to these blocks
        taken = iter(self._pop_blocks(num_missing, request, now))
        for cached in on_host:
            block = next(taken)
            self.host.load(cached, block)
            self.prefix.put(cached, block)
        request.tables = [
            BlockTable(len(found) - len(reads), [
                *(cached.block for cached in reads), *islice(taken, end - len(found))])
            for reads, end in zip(used, ends, strict=True)]
        request.num_reserved = max(ends)
        request.capacity = min(ends) * self.block_size
        block_hashes = request.block_hashes
        block_hashes.length = len(found)
        block_hashes.last = found[-1] if found else None
        self._set_advance_at(request, len(found))
        self.pool.cached.admitted(request, found)
        return num_computed

    def allocated(self, request: Request) -> list[NewBlocks]:
        """Returns all blocks of `request`, as a plan tells them to a slot without any."""
        return [NewBlocks(request.slot, group, (FREED,) * table.first + tuple(table.blocks))
                for group, table in enumerate(request.tables)]

    def largest_capacity(self, request: Request, spare: int) -> int:
        """Tokens that fit the blocks of `request` and all available ones but `spare`."""
        return request.capacity + max(0, self.pool.num_available - spare) // len(self._groups) * self.block_size

    def extend(self, request: Request, num_tokens: int, now: float) -> Sequence[NewBlocks] | None:
        """Append blocks up to a capacity of `num_tokens` tokens.  Returns them; None, and no change, if too few."""
        if num_tokens <= request.capacity:
            return ()
        missing = self._missing_to(request, num_tokens)
        if sum(missing) > self.pool.num_available:
            return None
        taken = iter(self._pop_blocks(sum(missing), request, now))
        new = [NewBlocks(request.slot, group, tuple(islice(taken, count)))
               for group, count in enumerate(missing) if count]
        for _, group, blocks in new:
            request.tables[group].blocks.extend(blocks)
        request.capacity = min([table.end for table in request.tables]) * self.block_size
        return new

    def num_lacking_to(self, request: Request, num_tokens: int) -> int:
        """Blocks to be freed before `extend` succeeds; below 1: it does."""
        return sum(self._missing_to(request, num_tokens)) - self.pool.num_available

    def _missing_to(self, request: Request, num_tokens: int) -> list[int]:
        """By group, the blocks that a capacity of `num_tokens` needs beyond those of `request`."""
        num_blocks = -(-num_tokens // self.block_size)
        return [max(0, num_blocks - table.end) for table in request.tables]

    def truncate(self, request: Request) -> None:
        """Free the blocks after the computed tokens: the drafts in them were not accepted, or they hold none.

        The blocks of its admission stay.  None of the freed ones is published: published blocks are computed.
        """
        num_kept = max(-(-request.num_computed // self.block_size), request.num_reserved)
        for group, table in enumerate(request.tables):
            freed = table.blocks[num_kept - table.first :]
            if freed:
                del table.blocks[num_kept - table.first :]
                self.pool.release(reversed(freed))
                self._freed[request.slot, group] += len(freed)
        request.capacity = min([table.end for table in request.tables]) * self.block_size

    def pop_freed(self) -> tuple[FreedBlocks, ...]:
        """Blocks truncated since the last call, of requests that still hold their slots."""
        return _popped(self._freed)

    def pop_expired(self) -> tuple[FreedBlocks, ...]:
        """Blocks that fell behind a window since the last call, of requests that still hold their slots."""
        return _popped(self._expired)

    def advance(self, request: Request) -> None:
        """Add the full computed blocks of `request` to the prefix cache, and free those that are behind a window."""
        num_full = request.num_computed // self.block_size
        if self._shares and request.block_hashes.length < num_full:
            self._publish(request, num_full)
        for group, (table, first) in enumerate(zip(request.tables, self._groups.firsts(num_full), strict=True)):
            if (expired := first - table.first) > 0:
                self.pool.release(table.blocks[:expired])
                del table.blocks[:expired]
                table.first = first
                self._expired[request.slot, group] += expired
        self._set_advance_at(request, num_full)

    def _publish(self, request: Request, num_full: int) -> None:
        for replaced in self.prefix.publish(request.block_hashes, request.tokens, request.tables, num_full):
            for cached in replaced.cached:
                self.pool.cached.forget(cached)
                self.pool.discard(cached.block)
                self.host.drop(cached)

    def release(self, request: Request) -> None:
        """Release all blocks, the last one first: a prefix is evicted after its continuation.

        If another request computed the same prefix at the same time, the cache has the other one's blocks.  They may
        have been released earlier, so they are moved to the end of the eviction order, too.
        """
        self.pool.cached.released(request)
        self.pool.release(_last_first(request.tables))
        entry = request.block_hashes.last if request.block_hashes.is_shared and self.renews_prefixes else None
        while entry is not None:
            self.pool.use_again([cached.block for cached in entry.cached])
            entry = entry.parent
        for group in range(len(request.tables)):
            self._freed.pop((request.slot, group), None)
            self._expired.pop((request.slot, group), None)
        request.tables = []
        request.capacity = 0
        request.block_hashes.rewind()

    def pin(self, request: Request, transfer: KVTransfer, now: float) -> None:
        """Keep the blocks of the prompt of `request`, which is about to end, for the engine that reads them."""
        num_blocks = -(-request.num_prompt // self.block_size)
        tenant = request.spec.slo.tenant
        self.pinned.pin(transfer.transfer_id, tenant, request.blocks[:num_blocks], now + transfer.timeout)

    def check(self, requests: Iterable[Request]) -> None:
        """Check conservation of blocks over all unfinished `requests`.  Raises ConservationError."""
        unfinished = list(requests)
        self.pool.check([*(request.blocks for request in unfinished), *self.pinned.block_lists])
        self.host.check(self.prefix.has_entry)
        for request in unfinished:
            num_full = request.num_computed // self.block_size
            if request.block_hashes.length > num_full:
                raise ConservationError(f"{request.request_id} has published what it has not computed")
            firsts = self._groups.firsts(num_full)
            if [table.first for table in request.tables] not in ([], firsts):
                raise ConservationError(f"{request.request_id} does not keep its windows' blocks, from {firsts} on")

    def _pop_blocks(self, count: int, request: Request, now: float) -> list[int]:
        """Returns `count` blocks for `request`, evicting cached ones where too few are free."""
        if (lacking := count - self.pool.num_free) > 0:
            self.host.order.now = now
            for block in self.pool.evict(lacking):
                lost = self.host.keep(self.prefix.vacate(block), block)
                if lost is not None:
                    self.prompts.evicted(lost.entry, request, now)
                    self.prefix.forget(lost.entry)
        return self.pool.pop(count)

    def _set_advance_at(self, request: Request, num_full: int) -> None:
        request.advance_at = (num_full + 1) * self.block_size if self._advances else NEVER


def _popped(blocks: Counter[tuple[int, int]]) -> tuple[FreedBlocks, ...]:
    if not blocks:
        return ()
    popped = tuple([FreedBlocks(slot, group, count) for (slot, group), count in blocks.items()])
    blocks.clear()
    return popped


def _last_first(tables: Sequence[BlockTable]) -> Iterator[int]:
    """All blocks, those of the last tokens first, whatever their group."""
    if len(tables) == 1:
        yield from reversed(tables[0].blocks)
        return
    for index in range(max([table.end for table in tables], default=0) - 1, -1, -1):
        for table in tables:
            if table.first <= index < table.end:
                yield table.blocks[index - table.first]
