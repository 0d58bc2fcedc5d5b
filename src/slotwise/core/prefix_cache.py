"""Prefix cache: full blocks by content, so that equal prefixes of requests are computed once.

    salt ◄── t0 ... t15 ◄── t16 ... t31 ◄── t32 ... t47        each entry points to its predecessor
              block 7         block 2          block 9

An entry is looked up by a digest of its tokens and the predecessor's digest, back to the salt.  A hit counts only if
the tokens and the predecessor entry are the same, too.  So a digest collision may cost a hit but never gives a false
one, and tenants with different salts never share.  After vLLM's automatic prefix caching; the chain of verified entries
is SGLang's radix tree, a block an edge (Zheng et al., 2024).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

NOWHERE = -1  # no device block, no host block

Digest = Callable[[tuple[int, tuple[int, ...]]], int]
"""Digest of (previous digest, tokens of the block).  Python's hash of integers is the same in every process."""


class Entry:
    """A published block: computed, and never written again.  On the device, in host memory, or both."""

    __slots__ = ("before", "block", "digest", "host_block", "tokens")

    def __init__(self, block: int, digest: int, tokens: tuple[int, ...], before: Entry | str) -> None:
        self.block = block  # device block
        self.host_block = NOWHERE
        self.digest = digest
        self.tokens = tokens
        self.before = before  # the entry before, or the salt

    def holds(self, tokens: tuple[int, ...], before: Entry | str) -> bool:
        return self.tokens == tokens and (self.before is before or (isinstance(before, str) and self.before == before))


class BlockHashes:
    """A request's known tokens by block, their digests, and how many of these blocks are in the prefix cache."""

    __slots__ = ("before", "digests", "length", "parts", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.parts: list[tuple[int, ...]] = []
        self.digests: list[int] = []
        self.before: Entry | str = salt  # the last of the `length` entries, or the salt
        self.length = 0  # blocks published or found

    def rewind(self) -> None:
        """Reset to the salt: the request released its blocks."""
        self.before = self.salt
        self.length = 0


class PrefixCache:
    """Maps digests to published blocks.  BlockPool counts references and evicts; HostCache owns the host blocks."""

    def __init__(self, block_size: int, digest: Digest = hash) -> None:
        self._block_size = block_size
        self._digest = digest
        self._entries: dict[int, Entry] = {}  # by digest
        self._of_block: dict[int, Entry] = {}

    @property
    def blocks(self) -> Sequence[int]:
        """Published device blocks."""
        return tuple(self._of_block)

    def match(self, block_hashes: BlockHashes, tokens: Sequence[int], num_tokens: int) -> list[Entry]:
        """Returns the cached entries of the longest prefix of `tokens[:num_tokens]`, in order."""
        found: list[Entry] = []
        before: Entry | str = block_hashes.salt
        for index in range(num_tokens // self._block_size):
            self._extend(block_hashes, tokens, index)
            entry = self._entries.get(block_hashes.digests[index])
            if entry is None or not entry.holds(block_hashes.parts[index], before):
                break
            found.append(entry)
            before = entry
        return found

    def publish(self, block_hashes: BlockHashes, tokens: Sequence[int], block: int) -> Entry | None:
        """Publish `block` as the next of `block_hashes`, unless its contents are on the device already.

        Returns the entry it replaced, if any: same digest, but its predecessor is gone, so it cannot be found any more.
        """
        index = block_hashes.length
        self._extend(block_hashes, tokens, index)
        digest, part = block_hashes.digests[index], block_hashes.parts[index]
        entry = self._entries.get(digest)
        replaced: Entry | None = None
        if entry is None or not entry.holds(part, block_hashes.before):
            if (replaced := entry) is not None:
                self._of_block.pop(replaced.block, None)
            entry = Entry(block, digest, part, block_hashes.before)
            self._entries[digest] = entry
            self._of_block[block] = entry
        elif entry.block == NOWHERE:
            self.put(entry, block)
        block_hashes.before = entry
        block_hashes.length += 1
        return replaced

    def has(self, block: int) -> bool:
        return block in self._of_block

    def has_entry(self, entry: Entry) -> bool:
        """Whether `entry` can be found by its digest."""
        return self._entries.get(entry.digest) is entry

    def put(self, entry: Entry, block: int) -> None:
        """Map `entry`, which was not on the device, to device block `block`."""
        entry.block = block
        self._of_block[block] = entry

    def vacate(self, block: int) -> Entry:
        """Unmap `block`, which is about to be reallocated.  Returns the entry that it held."""
        entry = self._of_block.pop(block)
        entry.block = NOWHERE
        return entry

    def forget(self, entry: Entry) -> None:
        """Remove `entry`, which is neither on the device nor on the host."""
        del self._entries[entry.digest]

    def _extend(self, block_hashes: BlockHashes, tokens: Sequence[int], index: int) -> None:
        """Split `tokens` up to block `index`; each block of a request is split and digested once."""
        size = self._block_size
        for at in range(len(block_hashes.parts), index + 1):
            part = tuple(tokens[at * size : (at + 1) * size])
            before = block_hashes.digests[-1] if block_hashes.digests else zlib.crc32(block_hashes.salt.encode())
            block_hashes.parts.append(part)
            block_hashes.digests.append(self._digest((before, part)))
