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
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import count

NOWHERE = -1  # no device block, no host block

Digest = Callable[[tuple[int, tuple[int, ...]]], int]
"""Digest of (previous digest, tokens of the block).  Python's hash of integers is the same in every process."""


class CachedBlock:
    """An entry's keys and values in one cache group: on the device, in host memory, on both or on neither."""

    __slots__ = ("block", "entry", "host_block")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.block = NOWHERE  # device block
        self.host_block = NOWHERE

    @property
    def is_somewhere(self) -> bool:
        return self.block != NOWHERE or self.host_block != NOWHERE


class Entry:
    """A published block of tokens: computed, and never written again."""

    __slots__ = ("before", "cached", "digest", "number", "tokens")

    def __init__(
        self, number: int, digest: int, tokens: tuple[int, ...], before: int | str, num_groups: int = 1,
    ) -> None:
        self.number = number  # no other entry has or had it
        self.digest = digest
        self.tokens = tokens
        self.before = before  # number of the entry before, or the salt
        self.cached = tuple([CachedBlock(self) for _ in range(num_groups)])  # by group

    def holds(self, tokens: tuple[int, ...], before: int | str) -> bool:
        return self.tokens == tokens and self.before == before


class BlockHashes:
    """A request's known tokens by block, their digests, and how many of these blocks are in the prefix cache."""

    __slots__ = ("before", "digests", "length", "parts", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.parts: list[tuple[int, ...]] = []
        self.digests: list[int] = []
        self.before: int | str = salt  # number of the last of the `length` entries, or the salt
        self.length = 0  # blocks published or found

    def rewind(self) -> None:
        """Reset to the salt: the request released its blocks."""
        self.before = self.salt
        self.length = 0


class PrefixCache:
    """Maps digests to published blocks.  BlockPool counts references and evicts; HostCache owns the host blocks.

    Args:
        windows: blocks that each cache group looks back on.
    """

    def __init__(self, block_size: int, windows: Sequence[int], digest: Digest = hash) -> None:
        self._block_size = block_size
        self._windows = windows
        self._digest = digest
        self._entries: dict[int, Entry] = {}  # by digest
        self._of_block: dict[int, CachedBlock] = {}
        self._numbers = count()

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
        found: list[Entry] = []
        before: int | str = block_hashes.salt
        for index in range(num_tokens // self._block_size):
            self._extend(block_hashes, tokens, index)
            entry = self._entries.get(block_hashes.digests[index])
            if entry is None or not entry.holds(block_hashes.parts[index], before):
                break
            found.append(entry)
            before = entry.number
        return found[: self._usable(found, max_loads)]

    def _usable(self, entries: Sequence[Entry], max_loads: int) -> int:
        """Length of the longest usable prefix of `entries`."""
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
        """By group, the blocks that a request reads which begins behind the prefix `entries`."""
        return [[entry.cached[group] for entry in entries[max(0, len(entries) - window) :]]
                for group, window in enumerate(self._windows)]

    def publish(self, block_hashes: BlockHashes, tokens: Sequence[int], blocks: Sequence[int]) -> Entry | None:
        """Publish `blocks`, one of each group, as the next of `block_hashes`, where their contents are not on the
        device already.

        Returns the entry it replaced, if any: same digest, but its predecessor is gone, so it cannot be found any more.
        """
        index = block_hashes.length
        self._extend(block_hashes, tokens, index)
        digest, part = block_hashes.digests[index], block_hashes.parts[index]
        entry = self._entries.get(digest)
        replaced: Entry | None = None
        if entry is None or not entry.holds(part, block_hashes.before):
            if (replaced := entry) is not None:
                for cached in replaced.cached:
                    self._of_block.pop(cached.block, None)
            entry = Entry(next(self._numbers), digest, part, block_hashes.before, len(self._windows))
            self._entries[digest] = entry
        for cached, block in zip(entry.cached, blocks, strict=True):
            if cached.block == NOWHERE:
                self.put(cached, block)
        block_hashes.before = entry.number
        block_hashes.length += 1
        return replaced

    def has(self, block: int) -> bool:
        return block in self._of_block

    def has_entry(self, entry: Entry) -> bool:
        """Whether `entry` can be found by its digest."""
        return self._entries.get(entry.digest) is entry

    def put(self, cached: CachedBlock, block: int) -> None:
        """Map `cached`, which was not on the device, to device block `block`."""
        cached.block = block
        self._of_block[block] = cached

    def vacate(self, block: int) -> CachedBlock:
        """Unmap `block`, which is about to be reallocated.  Returns what it held."""
        cached = self._of_block.pop(block)
        cached.block = NOWHERE
        return cached

    def forget(self, entry: Entry) -> None:
        """Remove `entry` if no group has it any more, on the device or on the host."""
        if not any(cached.is_somewhere for cached in entry.cached) and self.has_entry(entry):
            del self._entries[entry.digest]
            entry.cached = ()  # they name each other, and would be left to the collector of circular garbage

    def _extend(self, block_hashes: BlockHashes, tokens: Sequence[int], index: int) -> None:
        """Split `tokens` up to block `index`; each block of a request is split and digested once."""
        size = self._block_size
        for at in range(len(block_hashes.parts), index + 1):
            part = tuple(tokens[at * size : (at + 1) * size])
            before = block_hashes.digests[-1] if block_hashes.digests else zlib.crc32(block_hashes.salt.encode())
            block_hashes.parts.append(part)
            block_hashes.digests.append(self._digest((before, part)))


def _is_on_host(cached: CachedBlock) -> bool:
    """Whether it is in host memory only."""
    return cached.block == NOWHERE and cached.host_block != NOWHERE
