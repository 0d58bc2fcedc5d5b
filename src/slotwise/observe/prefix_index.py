"""Which pieces of prompts the prefix cache holds, for routers: a fold over step records.

A router names the pieces of a prompt by digests (`routing.prompt`); the engine knows blocks of tokens.  A piece is
taken to end at the token that has the same share of the prompt before it, and to be cached as long as the last full
block up to there is:

    bytes    |── piece 0 ──|── piece 1 ──|── piece 2 ──|─ rest ─|
    tokens   |─ block 7 ─|─ block 2 ─|─ block 9 ─|─ block 4 ─|...      piece 1 is cached while block 2 is

The cache evicts the end of a chain before its beginning, so the blocks before are there, too.  A block given to another
request holds its pieces no longer.  An adapter takes the pieces of its prompts with it: one that is loaded later by the
same name finds none of its blocks.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from slotwise.core.cache_causes import FOUND
from slotwise.core.record import FREED, PromptSpan, StepRecord
from slotwise.engine.messages import Observer

if TYPE_CHECKING:
    from slotwise.engine.messages import EngineInfo

MAX_CHANGES = 1 << 16  # remembered; a router that has missed more gets the whole index
MAX_OF_BLOCK = 64  # pieces of a block
FADE = 0.99  # decay of the mean tokens of a piece, at each request


class Changes(NamedTuple):
    """What has changed since a version of the index."""

    version: int
    added: list[int]  # all pieces, if `is_whole`
    removed: list[int]
    is_whole: bool


class Origin(NamedTuple):
    """Where a piece comes from."""

    adapter: int  # its number; 0: the base model
    tenant: str  # that sent the prompt


@dataclass(slots=True)
class _Prompt:
    """A request whose prompt is not computed to its last piece."""

    pieces: tuple[int, ...]
    ends: list[int]  # tokens up to each piece's end, at least a block
    origin: Origin
    blocks: tuple[int, ...] = ()
    num_computed: int = 0  # pieces


@dataclass(slots=True)
class PrefixIndex(Observer):
    """The pieces cached now, and the changes up to here."""

    instance: str = field(default_factory=lambda: secrets.token_hex(8))  # versions of another one mean nothing
    piece_tokens: float = 0.0  # mean tokens of a piece; 0: no prompt yet
    _block_size: int = 1
    _shares: bool = False  # the engine has a prefix cache
    _generation: int = 0  # of the cache
    _version: int = 0
    _changes: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=MAX_CHANGES))  # piece, is it added
    _block_of: dict[int, int] = field(default_factory=dict)  # by piece
    _pieces_of: dict[int, dict[int, None]] = field(default_factory=dict)  # by block, the oldest first
    _origin_of: dict[int, Origin] = field(default_factory=dict)  # by piece
    _prompts: dict[int, _Prompt] = field(default_factory=dict)  # by request

    def expect(self, request_id: int, prefix: tuple[int, tuple[int, ...]], num_tokens: int, piece_bytes: int,
               adapter: int = 0, tenant: str = "") -> None:
        """A request has been submitted.

        Args:
            prefix: the bytes of its prompt as the router reads it, and the pieces.
            num_tokens: of its prompt, as the engine reads it.
            piece_bytes: bytes of a piece.
            adapter: number of its adapter; 0: the base model.
            tenant: that sent it.
        """
        num_bytes, pieces = prefix
        if not pieces or not self._shares:
            return
        share = num_tokens / num_bytes
        kept = self.piece_tokens or share * piece_bytes
        self.piece_tokens = kept * FADE + share * piece_bytes * (1 - FADE)
        ends = [max(self._block_size, int(share * piece_bytes * number)) for number in range(1, len(pieces) + 1)]
        self._prompts[request_id] = _Prompt(pieces, ends, Origin(adapter, tenant))

    def changes(self, instance: str, since: int) -> Changes:
        """Returns the changes since version `since` of `instance`; all pieces where they are not remembered."""
        missed = self._version - since
        if instance != self.instance or not 0 <= missed <= len(self._changes):
            return Changes(self._version, list(self._block_of), [], True)
        net = dict(islice(self._changes, len(self._changes) - missed, None))
        return Changes(self._version, [piece for piece, is_added in net.items() if is_added],
                       [piece for piece, is_added in net.items() if not is_added], False)

    # -- the fold ------------------------------------------------------------------------------------------------

    def started(self, info: EngineInfo) -> None:
        """A new engine has an empty cache."""
        self._block_size, self._shares = info.limits.block_size, info.limits.enable_prefix_caching
        self._clear()

    def generation_is(self, generation: int) -> None:
        """The generation of the cache from here on: what was cached in another is never found."""
        if generation != self._generation:
            self._generation = generation
            self._clear()

    def adapters_are(self, numbers: Collection[int]) -> None:
        """These adapters may be named: what was cached with others is never found."""
        known = {0, *numbers}
        self._forget_all([piece for piece, origin in self._origin_of.items() if origin.adapter not in known])

    def forget(self, tenant: str) -> None:
        """The prompts that a tenant has sent were removed from the cache; "": those of all tenants."""
        for number in [number for number, one in self._prompts.items() if tenant in ("", one.origin.tenant)]:
            del self._prompts[number]
        self._forget_all([piece for piece, origin in self._origin_of.items() if tenant in ("", origin.tenant)])

    def _forget_all(self, pieces: Iterable[int]) -> None:
        for piece in pieces:
            del self._pieces_of[self._block_of[piece]][piece]
            self._forget(piece)

    def _forget(self, piece: int) -> None:
        del self._block_of[piece]
        del self._origin_of[piece]
        self._changed(piece, is_added=False)

    def _clear(self) -> None:
        for piece in list(self._block_of):
            self._forget(piece)
        self._pieces_of.clear()
        self._prompts.clear()

    def stepped(self, record: StepRecord) -> None:
        if self._prompts or self._pieces_of:
            self._reallocate(record)
        if self._prompts:
            self._compute(record)
            for end in record.ended:
                self._prompts.pop(end.request_id, None)

    def _reallocate(self, record: StepRecord) -> None:
        plan, cached, spans = record.plan, dict(record.admitted), dict(record.lookups)
        joined = {slot: request_id for slot, request_id in zip(plan.slots, plan.request_ids, strict=True)
                  if request_id in cached}
        for slot, group, blocks in [blocks for plan in record.plans for blocks in plan.new_blocks]:
            request_id = joined.get(slot, -1)
            for block in self._new(blocks, spans.get(request_id, ())):
                for piece in self._pieces_of.pop(block, ()):
                    self._forget(piece)
            if group == 0 and request_id in self._prompts:
                prompt = self._prompts[request_id]
                prompt.blocks, prompt.num_computed = blocks, 0
                self._add(request_id, cached[request_id])

    def _new(self, blocks: Sequence[int], spans: Iterable[PromptSpan]) -> Iterator[int]:
        """Yields those of a request's blocks that held something else before: all but those found on the device.

        Args:
            spans: of its prompt, if it is admitted with these blocks.
        """
        start = 0
        for span in spans:
            end = span.end // self._block_size
            if span.cause != FOUND:  # what is in host memory or on disk is copied to blocks that were reallocated
                yield from blocks[start:end]
            start = end
        yield from blocks[start:]

    def _compute(self, record: StepRecord) -> None:
        plan = record.plan
        for request_id, start, count in zip(plan.request_ids, plan.starts, plan.counts, strict=True):
            if request_id in self._prompts:
                self._add(request_id, start + count)

    def _add(self, request_id: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a request are computed."""
        prompt = self._prompts[request_id]
        while prompt.num_computed < len(prompt.pieces) and prompt.ends[prompt.num_computed] <= num_tokens:
            piece, end = prompt.pieces[prompt.num_computed], prompt.ends[prompt.num_computed]
            prompt.num_computed += 1
            index = end // self._block_size - 1
            block = prompt.blocks[index] if index < len(prompt.blocks) else FREED
            if piece in self._block_of or block == FREED:
                continue
            self._block_of[piece] = block
            # One that ends behind a block counts as the block's: of a prefix that prompts share, one for each prompt.
            pieces = self._pieces_of.setdefault(block, {})
            if len(pieces) == MAX_OF_BLOCK:
                oldest = next(iter(pieces))
                del pieces[oldest]
                self._forget(oldest)
            pieces[piece] = None
            self._origin_of[piece] = prompt.origin
            self._changed(piece, is_added=True)
        if prompt.num_computed == len(prompt.pieces):
            del self._prompts[request_id]

    def _changed(self, piece: int, *, is_added: bool) -> None:
        self._version += 1
        self._changes.append((piece, is_added))
