"""Prefix cache: full blocks by content, so that equal prefixes of requests are computed once.

    salt ◄── t0 ... t15 ◄── t16 ... t31 ◄── t32 ... t47        each entry names its predecessor
    full      block 7         block 2          block 9          its block in each cache group
    windowed    --            block 4          block 5          evicted: the groups' blocks come and go one by one

An entry is looked up by a digest of its tokens and the predecessor's digest, back to the salt.  A hit counts only if
the tokens and the predecessor entry are the same, too.  So a digest collision may cost a hit but never gives a false
one, and tenants with different salts never share.  After vLLM's automatic prefix caching; the chain of verified entries
is SGLang's radix tree, a block an edge (Zheng et al., 2024).

A prefix is usable if each group has the blocks that its window reaches back to from the prefix's end: a group of full
attention all of them, a windowed one the last few (`core/cache_groups.py`).

Entries with the same predecessor are siblings.  So where a prompt is not found any further, the entries after the last
one found are the nearest cached prompts, and the first token at which they differ is known (`core/prompt_lookup.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from slotwise.core.cache_groups import UNBOUNDED, BlockTable

NOWHERE = -1  # no device block, no host block

Digest = Callable[[tuple[int, tuple[int, ...]]], int]
"""Digest of (previous digest, tokens of the block).  Python's hash of integers is the same in every process."""


class CachedBlock:
    """An entry's keys and values in one cache group: on the device, in host memory, on both or on neither."""

    __slots__ = ("before", "block", "entry", "host_block", "was_vacated")

    def __init__(self, entry: Entry, before: CachedBlock | None, block: int) -> None:
        self.entry = entry
        self.before = before  # of the entry before, in the same group
        self.block = block  # device block
        self.host_block = NOWHERE
        self.was_vacated = False  # it left the device block in which it was published, and may be back in another one

    @property
    def position(self) -> int:
        """Blocks before it in its prompt."""
        return self.entry.position

    @property
    def is_somewhere(self) -> bool:
        return self.block != NOWHERE or self.host_block != NOWHERE


class Entry:
    """A published block of tokens: computed, and never written again."""

    __slots__ = ("before", "cached", "content_key", "digest", "latest_child", "newer", "number", "older", "parent",
                 "position", "salt", "tokens")

    def __init__(
        self, number: int, digest: int, tokens: tuple[int, ...], before: int | str, blocks: Sequence[int],
        parent: Entry | None = None,
    ) -> None:
        self.number = number  # never used again
        self.digest = digest
        self.tokens = tokens
        self.before = before  # number of the entry before, or the salt
        self.position: int = 0 if parent is None else parent.position + 1  # blocks before it
        parents = parent.cached if parent is not None and parent.cached else (None,) * len(blocks)
        self.cached: tuple[CachedBlock, ...] = tuple([  # by group
            CachedBlock(self, *one) for one in zip(parents, blocks, strict=True)])
        self.salt = ""
        self.content_key = b""  # a digest of all that determines it (`engine/kv_disk.py`); b"": unknown
        self.parent: Entry | None = None  # the entry before, or the root of its salt
        self.latest_child: Entry | None = None
        self.older: Entry | None = None  # siblings, by when they were published
        self.newer: Entry | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every group has it, on the device or on the host."""
        return all(cached.is_somewhere for cached in self.cached)

    def children(self, most: int) -> Iterator[Entry]:
        """Yields the latest `most` entries after this one, the latest first."""
        child = self.latest_child
        for _ in range(most):
            if child is None:
                return
            yield child
            child = child.older

    def link(self, parent: Entry) -> None:
        """Make this the latest entry after `parent`."""
        self.parent, self.salt = parent, parent.salt
        older = self.older = parent.latest_child
        if older is not None:
            older.newer = self
        parent.latest_child = self

    def unlink(self) -> None:
        """Undo `link`.  The entries after this one can no longer be found."""
        older, newer, parent = self.older, self.newer, self.parent
        if older is not None:
            older.newer = newer
        if newer is not None:
            newer.older = older
        elif parent is not None and parent.latest_child is self:
            parent.latest_child = older
        self.latest_child = self.older = self.newer = self.parent = None

    def holds(self, tokens: tuple[int, ...], before: int | str) -> bool:
        return self.tokens == tokens and self.before == before


class BlockHashes:
    """A request's known tokens by block, their digests, and how many of these blocks are in the prefix cache.

    Args:
        salt: requests with another one never find its blocks.
        owner: requests of the same owner may be told that a prompt is cached under another of its salts.
    """

    __slots__ = ("digests", "is_shared", "last", "length", "owner", "parts", "salt")

    def __init__(self, salt: str, owner: str = "") -> None:
        self.salt = salt
        self.owner = owner
        self.parts: list[tuple[int, ...]] = []
        self.digests: list[int] = []
        self.is_shared = False  # some entry's block is another request's, which computed it at the same time
        self.last: Entry | None = None  # the last of the `length` entries
        self.length = 0  # blocks published or found

    def rewind(self) -> None:
        """Reset to the salt: the request released its blocks."""
        self.is_shared = False
        self.last = None
        self.length = 0


class Root(Entry):
    """The beginning of all prompts of a salt."""

    __slots__ = ("owner",)

    def __init__(self, salt: str, owner: str) -> None:
        super().__init__(NOWHERE, _seed(salt), (), salt, ())
        self.salt = salt
        self.owner = owner


class PrefixCache:
    """Maps digests to published blocks.  BlockPool counts references and evicts; HostCache owns the host blocks.

    Args:
        windows: blocks that each cache group looks back on.
    """

    def __init__(self, block_size: int, windows: Sequence[int], digest: Digest = hash) -> None:
        self._block_size = block_size
        self._windows = windows
        self._is_full = tuple(windows) == (UNBOUNDED,)  # one group, of full attention
        self._digest = digest
        self._entries: dict[int, Entry] = {}  # by digest
        self._roots: dict[str, Root] = {}  # by salt, those with entries
        self._salts: dict[str, dict[str, None]] = {}  # by owner, those of `_roots`
        self._of_block: dict[int, CachedBlock] = {}
        self._numbers = count()
        self.new_entries: list[Entry] | None = None  # published since they were last read; None: not collected

    @property
    def blocks(self) -> Sequence[int]:
        """Published device blocks."""
        return tuple(self._of_block)

    def match(
        self, block_hashes: BlockHashes, tokens: Sequence[int], num_tokens: int, max_loads: int,
    ) -> list[Entry]:
        """Returns the entries of the longest usable prefix of `tokens[:num_tokens]`, in order.

        At most `max_loads` of the blocks that it needs are in host memory only.
        """
        found = self.chain(block_hashes, tokens, num_tokens)
        return found[: self._usable(found, max_loads)]

    def chain(self, block_hashes: BlockHashes, tokens: Sequence[int], num_tokens: int) -> list[Entry]:
        """Returns the entries of the longest prefix of `tokens[:num_tokens]`, usable or not, in order."""
        found: list[Entry] = []
        before: int | str = block_hashes.salt
        num_blocks = num_tokens // self._block_size
        self._extend(block_hashes, tokens, num_blocks - 1)
        for digest, part in islice(zip(block_hashes.digests, block_hashes.parts, strict=True), num_blocks):
            entry = self._entries.get(digest)
            if entry is None or entry.before != before or entry.tokens != part:
                break
            found.append(entry)
            before = entry.number
        return found

    def digest(self, block_hashes: BlockHashes, tokens: Sequence[int], index: int) -> int:
        """The digest of block `index` of a request's `tokens`."""
        self._extend(block_hashes, tokens, index)
        return block_hashes.digests[index]

    def tokens_of(self, block_hashes: BlockHashes, tokens: Sequence[int], num_blocks: int) -> Sequence[tuple[int, ...]]:
        """The first `num_blocks` blocks of a request's `tokens`."""
        self._extend(block_hashes, tokens, num_blocks - 1)
        return block_hashes.parts[:num_blocks]

    @property
    def salts(self) -> Sequence[str]:
        """The salts of cached prompts."""
        return tuple(self._roots)

    def with_digest(self, digest: int) -> Entry | None:
        return self._entries.get(digest)

    def root(self, salt: str) -> Root | None:
        """The beginning of all prompts of `salt`; None if the cache has no prompt of it."""
        return self._roots.get(salt)

    def other_salts(self, block_hashes: BlockHashes, most: int) -> list[str]:
        """Up to `most` other salts of the same owner with cached prompts, the latest first."""
        salts = self._salts.get(block_hashes.owner, {})
        return [salt for salt in islice(reversed(salts), most + 1) if salt != block_hashes.salt][:most]

    def num_under(self, salt: str, block_hashes: BlockHashes, tokens: Sequence[int], most: int) -> int:
        """How many of the first `most` blocks of `tokens` are cached under another `salt`."""
        before: int | str = salt
        digest = _seed(salt)
        for index in range(most):
            self._extend(block_hashes, tokens, index)
            part = block_hashes.parts[index]
            digest = self._digest((digest, part))
            entry = self._entries.get(digest)
            if entry is None or not entry.holds(part, before):
                return index
            before = entry.number
        return most

    def _usable(self, entries: Sequence[Entry], max_loads: int) -> int:
        """Length of the longest usable prefix of `entries`."""
        if self._is_full:  # each entry has its one block somewhere
            num_loads = 0
            for length, entry in enumerate(entries):
                num_loads += entry.cached[0].block == NOWHERE
                if num_loads > max_loads:
                    return length
            return len(entries)
        usable, groups = 0, range(len(self._windows))
        runs = [0] * len(groups)  # of each group: blocks present without a gap, up to here
        loads = 0  # blocks within the windows that are on the host only
        for length, entry in enumerate(entries, 1):
            is_usable = True
            for group in groups:
                window, cached = self._windows[group], entry.cached[group]
                runs[group] = runs[group] + 1 if cached.is_somewhere else 0
                loads += _is_on_host(cached)
                if length > window:
                    loads -= _is_on_host(entries[length - 1 - window].cached[group])
                if runs[group] < min(window, length):
                    is_usable = False
            if is_usable and loads <= max_loads:
                usable = length
        return usable

    def used(self, entries: Sequence[Entry]) -> list[list[CachedBlock]]:
        """By group, the blocks that a request reads when it begins after the prefix `entries`."""
        return [[entry.cached[group] for entry in entries[max(0, len(entries) - window) :]]
                for group, window in enumerate(self._windows)]

    def publish(self, block_hashes: BlockHashes, tokens: Sequence[int], tables: Sequence[BlockTable], end: int,
                ) -> list[Entry]:
        """Publish the unpublished blocks of `tables` before number `end` whose contents are not on the device.

        Returns the entries replaced: same digest, but the predecessor is gone, so they can no longer be found.
        """
        self._extend(block_hashes, tokens, end - 1)
        entries, digests, parts, last = self._entries, block_hashes.digests, block_hashes.parts, block_hashes.last
        before: int | str = block_hashes.salt if last is None else last.number
        replaced: list[Entry] = []
        for index in range(block_hashes.length, end):
            digest, part = digests[index], parts[index]
            blocks = [table.blocks[index - table.first] for table in tables]
            entry = entries.get(digest)
            if entry is not None and entry.holds(part, before):
                for cached, block in zip(entry.cached, blocks, strict=True):
                    if cached.block == NOWHERE:
                        self.put(cached, block)
                    elif cached.block != block:
                        block_hashes.is_shared = True
            else:
                if entry is not None:
                    replaced.append(entry)
                    self._unlink(entry)
                    for cached in entry.cached:
                        self._of_block.pop(cached.block, None)
                        cached.was_vacated = True
                entries[digest] = entry = Entry(next(self._numbers), digest, part, before, blocks, last)
                entry.link(self._make_root(block_hashes) if last is None else last)
                for cached in entry.cached:
                    self._of_block[cached.block] = cached
                if self.new_entries is not None:
                    self.new_entries.append(entry)
            before, last = entry.number, entry
        block_hashes.last, block_hashes.length = last, end
        return replaced

    def has(self, block: int) -> bool:
        return block in self._of_block

    def content(self, block: int) -> CachedBlock:
        """Returns what a published `block` holds."""
        return self._of_block[block]

    def has_entry(self, entry: Entry) -> bool:
        """Whether `entry` can be found by its digest."""
        return self._entries.get(entry.digest) is entry

    def published(self, block_hashes: BlockHashes, length: int) -> Entry | None:
        """Returns the last of a request's first `length` published blocks; None: it was replaced, or `length` is 0."""
        entry = self._entries.get(block_hashes.digests[length - 1]) if length else None
        return entry if entry is not None and entry.tokens == block_hashes.parts[length - 1] else None

    def put(self, cached: CachedBlock, block: int) -> None:
        """Map `cached`, which was not on the device, to device block `block`."""
        cached.block = block
        self._of_block[block] = cached

    def vacate(self, block: int) -> CachedBlock:
        """Unmap `block`, which is about to be reallocated.  Returns what it held."""
        cached = self._of_block.pop(block)
        cached.block, cached.was_vacated = NOWHERE, True
        return cached

    def forget(self, entry: Entry) -> None:
        """Remove `entry` if no group has it any longer, on the device or on the host."""
        for cached in entry.cached:  # a generator takes three times as long
            if cached.block != NOWHERE or cached.host_block != NOWHERE:
                return
        if self.has_entry(entry):
            del self._entries[entry.digest]
            self._unlink(entry)
            for cached in entry.cached:
                cached.before = None
            entry.cached = ()  # they refer to each other, and would wait for the garbage collector

    def _make_root(self, block_hashes: BlockHashes) -> Root:
        salt, owner = block_hashes.salt, block_hashes.owner
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Root(salt, owner)
            self._salts.setdefault(owner, {})[salt] = None
        return root

    def _unlink(self, entry: Entry) -> None:
        root = entry.parent
        entry.unlink()
        if isinstance(root, Root) and root.latest_child is None:
            del self._roots[root.salt]
            salts = self._salts[root.owner]
            del salts[root.salt]
            if not salts:
                del self._salts[root.owner]

    def _extend(self, block_hashes: BlockHashes, tokens: Sequence[int], index: int) -> None:
        """Split `tokens` up to block `index`; each block of a request is split and digested once.

        A block with the tokens of the one before shares its tuple: those of a simulation have no others.
        """
        size, parts, digests, digest = self._block_size, block_hashes.parts, block_hashes.digests, self._digest
        if index < len(parts):
            return
        known = tuple(tokens[len(parts) * size : (index + 1) * size])
        last, before = (parts[-1], digests[-1]) if parts else ((), _seed(block_hashes.salt))
        for start in range(0, len(known), size):
            part = known[start : start + size]
            if part == last:
                part = last
            parts.append(part)
            digests.append(before := digest((before, part)))
            last = part


def _seed(salt: str) -> int:
    return zlib.crc32(salt.encode())


def _is_on_host(cached: CachedBlock) -> bool:
    """Whether it is in host memory only."""
    return cached.block == NOWHERE and cached.host_block != NOWHERE
