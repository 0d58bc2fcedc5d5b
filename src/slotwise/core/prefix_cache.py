"""Blocks whose contents are known, so that equal beginnings of requests are computed once.

    salt ◄── t0 ... t15 ◄── t16 ... t31 ◄── t32 ... t47        each entry knows the one before it
              block 7         block 2          block 9

An entry is found by a digest that covers its tokens and, through the entry before it, everything back to the salt.  A
digest is only a hint: a hit is believed when the tokens are the same and so is the entry before, back to the salt
itself.  So equal digests of different contents cost a hit and never give one, and tenants with different salts never
share.  After vLLM's automatic prefix caching; the chain of verified entries is SGLang's radix tree, a block an edge
(Zheng et al., 2024).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

NOWHERE = -1  # no block of the device, no place of the host

Digest = Callable[[tuple[int, tuple[int, ...]]], int]
"""Of the digest before and a block's tokens.  Python's own hash of integers is the same in every process."""


class Entry:
    """One block's contents, published: computed, and never written again.  On the device, in host memory, or both."""

    __slots__ = ("before", "block", "digest", "host_block", "tokens")

    def __init__(self, block: int, digest: int, tokens: tuple[int, ...], before: Entry | str) -> None:
        self.block = block  # of the device
        self.host_block = NOWHERE  # in host memory
        self.digest = digest
        self.tokens = tokens
        self.before = before  # the entry before, or the salt

    def holds(self, tokens: tuple[int, ...], before: Entry | str) -> bool:
        return self.tokens == tokens and (self.before is before or (isinstance(before, str) and self.before == before))


class BlockHashes:
    """A request's known tokens, cut into blocks, and how far along them it is published or was found."""

    __slots__ = ("before", "digests", "length", "parts", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.parts: list[tuple[int, ...]] = []
        self.digests: list[int] = []
        self.before: Entry | str = salt  # the last entry of those that count
        self.length = 0  # entries behind us

    def rewind(self) -> None:
        """The request gave its blocks back."""
        self.before = self.salt
        self.length = 0


class PrefixCache:
    """What is known of which block.  References and eviction are the pool's, places in host memory the host tier's."""

    def __init__(self, block_size: int, digest: Digest = hash) -> None:
        self._block_size = block_size
        self._digest = digest
        self._entries: dict[int, Entry] = {}  # by digest
        self._of_block: dict[int, Entry] = {}

    @property
    def blocks(self) -> Sequence[int]:
        """Those that are published."""
        return tuple(self._of_block)

    def match(self, block_hashes: BlockHashes, tokens: Sequence[int], num_tokens: int) -> list[Entry]:
        """Entries for the beginning of `tokens`, up to `num_tokens` of them, in order."""
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
        """Let `block` be found as the next of `block_hashes`, unless its contents are on the device already.

        Returns an entry that was in its way, whose own beginning is gone: it can be found no more.
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

    def knows(self, entry: Entry) -> bool:
        """It can be found by its digest."""
        return self._entries.get(entry.digest) is entry

    def put(self, entry: Entry, block: int) -> None:
        """`block` holds an entry that was not on the device."""
        entry.block = block
        self._of_block[block] = entry

    def vacate(self, block: int) -> Entry:
        """`block` is about to be written again: what it held, which is on the device no more."""
        entry = self._of_block.pop(block)
        entry.block = NOWHERE
        return entry

    def forget(self, entry: Entry) -> None:
        """It is held nowhere."""
        del self._entries[entry.digest]

    def _extend(self, block_hashes: BlockHashes, tokens: Sequence[int], index: int) -> None:
        """Cut `tokens` up to block `index`; each block is cut and digested once in a request's life."""
        size = self._block_size
        for at in range(len(block_hashes.parts), index + 1):
            part = tuple(tokens[at * size : (at + 1) * size])
            before = block_hashes.digests[-1] if block_hashes.digests else zlib.crc32(block_hashes.salt.encode())
            block_hashes.parts.append(part)
            block_hashes.digests.append(self._digest((before, part)))
