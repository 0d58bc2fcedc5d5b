"""The prefix cache's blocks on disk: written in the background, found again after an eviction, a restart or a sleep.

    new request ─► DiskLink.offer: which of its blocks are in files? ─► found ─► WAITING_FOR_KV, blocks allocated
                                                                                    │ begin
    published block ─► follow ─► writer's queue ─► FOLDER/KEY-OWNER.kv ─► reader ───┘ ─► arrivals ─► computed
              in the order of eviction ◄── removed ──┘

A file is one block, the unit of eviction and of sharing.  Blocks of a megabyte or more make the cost of opening a file
small compared with reading it.  Its name is a content key: a cryptographic digest of all that determines the block's
bytes (checkpoint, types, kernels, block size, salt) and of all tokens up to its last one.  So a file can be trusted
without reading the blocks before it.  A file is written under a temporary name and renamed.  Its header contains the
key and a digest of the block, so a torn, damaged or foreign file is a miss.

The engine's thread only looks up names in memory and appends to queues.  While a block waits in the writer's queue, its
memory may be given to another request.  The prefix cache marks it as vacated before the plan is executed, and the
writer, which checks the mark after copying the block, drops it:

    engine   ... vacate ──────► execute the plan that overwrites the block
    writer   copy ────────────► look at the mark ──► write, or drop

While requests run, the writer looks for new blocks at intervals, because waking it would cost the engine's thread more
than all else that it does for a block.

`--eviction-policy` sets the order in which files are removed, too (`core/eviction.py`).  A file's name does not say
which block continues which: that is known of prompts that this process has written or looked up.

Blocks are read only if the measured read rate and the step-time model predict that reading is faster than computing.  A
read that turns out slower is abandoned.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import platform
import queue
import re
import secrets
import stat
import struct
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf, isinf
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from slotwise.core.eviction import Claim, Content, EvictionOrder, LeastRecentlyUsed, Tier, order_below
from slotwise.core.kv_transfers import KVTransfers
from slotwise.core.prefix_cache import NOWHERE, CachedBlock, Entry
from slotwise.core.record import DiskNews, PrefixOnDisk, ReceivedBlocks
from slotwise.core.request import Namespace, Request
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import work_of
from slotwise.core.transfer.sender import go_last
from slotwise.core.transfer.wire import Blocks
from slotwise.engine.kv_link import KVLink, News
from slotwise.errors import ThrottledWarning, described
from slotwise.platform import files

MAGIC = b"SWKVDSK2"
HEADER = struct.Struct("<8sQ32s32s")  # magic, bytes of the block, content key, BLAKE3 of the block
KEY_BYTES, OWNER_BYTES = 32, 8
NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})-([0-9a-f]{{{2 * OWNER_BYTES}}})\.kv")
UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.unfinished")
PAGE = 4096  # bytes; the space that a file takes is a multiple of it
MAX_FILES = 1 << 18  # in the index, which takes about 500 bytes for each
MAX_CLAIMS = 256  # on blocks that are not on disk yet
MAX_PENDING = 256  # blocks that wait to be written
PIECE = 1 << 20  # bytes that are read, digested or written at once while requests run: about 0.2 ms
REST = 19.0  # sleep after each piece, as a multiple of its CPU time, while requests run, which need the processor
CATCH_UP = 3.0  # a writer whose queue is half full sleeps a third as long
SECRET, SECRET_BYTES = "secret", 32
ASSUMED_RATE = 500e6  # bytes per second of a read, until one was measured
ASSUMED_CPU_RATE = 2e9  # bytes per second of a read's CPU time
# Seconds per byte; while requests run: True.
ASSUMED = {False: 1 / ASSUMED_RATE, True: 1 / ASSUMED_RATE + REST / ASSUMED_CPU_RATE}
RATE_EXPIRY = 60.0  # seconds after which a slow measured rate is forgotten
COUNT_INTERVAL = 0.05  # seconds between two reports of counts alone
REPORT_INTERVAL = 0.05  # seconds between two reports of a read in progress
EXPIRY_INTERVAL = 60.0  # seconds between two removals of files that are too old
WRITER_INTERVAL = 0.01  # seconds after which the writer looks for new blocks while requests run
LONGEST_PAUSE = 60.0  # seconds without writing after errors
LEAST_WAIT, MOST_WAIT = 0.5, 60.0  # seconds that a request waits for blocks before it computes them
UNKNOWN_WAIT = 10.0  # times the predicted time of a read, where that of computing is not known
START_DELAY = 0.005  # seconds from the arrival of a request to the beginning of its read, while nothing runs
JOIN_TIMEOUT = 5.0  # seconds for each thread

logger = logging.getLogger(__name__)


class StoredBlock:
    """A file of the index."""

    __slots__ = ("before", "key", "number", "owner", "position", "size", "written")

    def __init__(self, number: int, key: bytes, owner: str, size: int, written: float) -> None:
        self.number = number  # never used again
        self.key = key
        self.owner = owner
        self.size = size  # bytes that it takes on disk
        self.written = written  # seconds since 1970
        self.before: StoredBlock | None = None  # None: it is the first, or that is not known
        self.position = 0  # blocks before it, as far as they are known

    def follow(self, before: StoredBlock | None) -> None:
        """Set the block before it, while it is in no order."""
        if before is not None:
            self.before, self.position = before, before.position + 1


OrderOf = Callable[[Tier], EvictionOrder]
Rest = Callable[[], None]


def no_rest() -> None:
    """Goes on at once."""


class DiskStore:
    """Files of blocks in one folder, by content key; used by several threads, and by one process at a time.

    Args:
        folder: created if it is missing; other users must not be able to enter it.
        block_bytes: size of the blocks that this store reads and writes; it also keeps files of other sizes.
        most_bytes: bound on the size of all files.
        max_age: seconds after which a file is removed.
        clock: seconds since 1970.

    Raises:
        OSError: the folder cannot be created or read, belongs to another user or is in use, or not even one block fits.
    """

    def __init__(self, folder: Path, block_bytes: int, most_bytes: int, max_age: float,
                 clock: Callable[[], float] = time.time) -> None:
        from blake3 import blake3  # an engine without blocks on disk runs where this package is missing

        self._blake3 = blake3
        make_folder(folder)
        if _on_disk(HEADER.size + block_bytes) > most_bytes:
            raise OSError(errno.EFBIG, f"{most_bytes:,} bytes are fewer than those of one block, "
                                       f"{HEADER.size + block_bytes:,}: raise kv_disk_size")
        self.block_bytes = block_bytes
        self.num_damaged = 0
        self._folder, self._most, self._max_age, self._clock = folder, most_bytes, max_age, clock
        self._lock = threading.Lock()
        self._files: dict[bytes, StoredBlock] = {}
        self._blocks: dict[int, StoredBlock] = {}  # by number
        self._numbers = itertools.count()
        self.order: EvictionOrder = LeastRecentlyUsed()  # of their numbers
        self._claims: dict[bytes, Claim] = {}  # on blocks that are not on disk yet
        self._num_bytes = 0
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._list()
        except BlockingIOError:
            self.close()
            raise OSError(errno.EBUSY, "another engine uses it: give each its own folder") from None
        except BaseException:
            self.close()
            raise

    def _list(self) -> None:
        """Read the names of all files; remove unfinished files of killed processes, and files that are too old."""
        found: list[tuple[float, StoredBlock]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if UNFINISHED.fullmatch(entry.name):
                    self._unlink(entry.name)
                elif (name := NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_atime, self._block(
                        bytes.fromhex(name[1]), name[2], _on_disk(about.st_size), about.st_mtime)))
        for _, block in sorted(found, key=lambda one: (one[0], one[1].key)):
            self._add(block)
        self.expire()
        self._make_room(0)

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def num_bytes(self) -> int:
        """Bytes that all files take."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._files)

    def has(self, key: bytes) -> bool:
        """Whether there is a file for `key` that is not too old."""
        file = self._files.get(key)
        return file is not None and not self._is_old(file)

    def use(self, keys: Sequence[bytes]) -> None:
        """Mark the first blocks of a prompt as used now."""
        with self._lock:
            used = [block for key in keys if (block := self._files.get(key)) is not None]
            for block in used:
                self.order.remove(block.number)
            for before, block in pairwise(used):
                block.follow(before)
            for block in reversed(used):
                self.order.add(block.number)

    def order_by(self, order_of: OrderOf) -> None:
        """Move all blocks to another order."""
        with self._lock:
            order = order_of(Tier(max(1, self._most // _on_disk(HEADER.size + self.block_bytes)),
                                  self._blocks.__getitem__, attrgetter("number"), is_below=True))
            for _ in range(len(self.order)):
                order.add(self.order.pop())
            self.order = order
            self._claims.clear()

    def share_is(self, share: float) -> None:
        """Claims of one tenant may cover this share of the blocks that fit."""
        with self._lock:
            self.order.share_is(share)

    def claim(self, key: bytes, claim: Claim) -> None:
        """Set a claim on a block, or on one that is about to be written, and so on those before it."""
        with self._lock:
            if (block := self._files.get(key)) is not None:
                self.order.inherit(block, claim)
                return
            self._claims[key] = claim
            if len(self._claims) > MAX_CLAIMS:  # the oldest one of the tenant that has most goes
                (most, _), = Counter([one.tenant for one in self._claims.values()]).most_common(1)
                del self._claims[next(name for name, one in self._claims.items() if one.tenant == most)]

    def read(self, key: bytes, buffer: bytearray, rest: Rest = no_rest) -> bool:
        """Read a file into `buffer`, header and block; False if it is missing or damaged, and then removed.

        Args:
            buffer: `HEADER.size + block_bytes` long.
            rest: called between two pieces.
        """
        file = self._files.get(key)
        if file is None or self._is_old(file):
            return False
        try:
            is_right = self._read(key, file, buffer, rest)
        except FileNotFoundError:  # it was evicted since, or another program removed it
            self._remove(key)
            return False
        except OSError as error:
            logger.info("a block on disk cannot be read: %s", described(error))
            return False
        if not is_right:
            self.num_damaged += 1
            self._remove(key)
        return is_right

    def _read(self, key: bytes, file: StoredBlock, buffer: bytearray, rest: Rest) -> bool:
        path = self._folder / _name(key, file.owner)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(descriptor)
            if files.file_objection(about) or about.st_size != len(buffer):
                return False
            with contextlib.suppress(OSError):  # a read-only disk
                os.utime(descriptor, ns=(time.time_ns(), about.st_mtime_ns))  # the order of use, for the next process
            view, at, digest = memoryview(buffer), 0, self._blake3()
            while at < len(buffer):
                if not (count := os.readv(descriptor, [view[at : at + PIECE]])):
                    return False
                digest.update(view[max(at, HEADER.size) : at + count])
                at += count
                if at < len(buffer):
                    rest()
        finally:
            os.close(descriptor)
        return HEADER.unpack_from(buffer) == (MAGIC, self.block_bytes, key, digest.digest())

    def write(self, key: bytes, owner: str, buffer: bytearray, before: bytes = b"", rest: Rest = no_rest) -> None:
        """Write the block in `buffer`, which begins with room for a header, and continues the block `before`.

        Args:
            rest: called after each piece.

        Raises:
            OSError: the disk is full, read-only or failing.
        """
        digest, view = self._blake3(), memoryview(buffer)
        for at in range(HEADER.size, len(buffer), PIECE):
            digest.update(view[at : at + PIECE])
            rest()
        HEADER.pack_into(buffer, 0, MAGIC, self.block_bytes, key, digest.digest())
        self._make_room(_on_disk(len(buffer)))
        unfinished = f".{secrets.token_hex(8)}.unfinished"
        try:
            descriptor = os.open(self._folder / unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                                 | os.O_CLOEXEC, files.PRIVATE)
            try:
                at = 0
                while at < len(buffer):
                    at += os.write(descriptor, view[at : at + PIECE])
                    rest()
            finally:
                os.close(descriptor)
            os.rename(self._folder / unfinished, self._folder / _name(key, owner))
        except BaseException:
            self._unlink(unfinished)
            raise
        with self._lock:
            block = self._block(key, owner, _on_disk(len(buffer)), self._clock())
            block.follow(self._files.get(before))
            self._add(block)

    def expire(self) -> None:
        """Remove the files that are too old."""
        with self._lock:
            known = list(self._files.items())
        for key, file in known:
            if self._is_old(file):
                self._remove(key)

    def remove_all(self, owner: str | None = None) -> int:
        """Remove the files of an owner, or all, which are no longer found or on disk when it returns.

        Returns their number.

        Raises:
            OSError: some could not be removed: this process does not find them, but the next one would.
        """
        names = []
        for file in [file for file in list(self._files.values()) if owner in (None, file.owner)]:
            with self._lock:  # for one at a time: the engine's thread may wait for it
                if self._files.get(file.key) is file:
                    self._take(file)
                    names.append(_name(file.key, file.owner))
        failures = [error for name in names if (error := self._unlink(name)) is not None]
        if failures:
            raise OSError(failures[0].errno, f"{len(failures)} of {len(names)} blocks stay on disk: "
                                             f"{described(failures[0])}")
        return len(names)

    def _make_room(self, size: int) -> None:
        while self._num_bytes + size > self._most or len(self._files) >= MAX_FILES:
            with self._lock:
                if not self._files:
                    return
                evicted = self._blocks.pop(self.order.pop())
                del self._files[evicted.key]
                self._num_bytes -= evicted.size
            self._unlink(_name(evicted.key, evicted.owner))

    def _block(self, key: bytes, owner: str, size: int, written: float) -> StoredBlock:
        return StoredBlock(next(self._numbers), key, owner, size, written)

    def _add(self, block: StoredBlock) -> None:
        if (known := self._files.get(block.key)) is not None:
            self._take(known)
        self._files[block.key] = self._blocks[block.number] = block
        self._num_bytes += block.size
        self.order.add(block.number)
        if (claim := self._claims.pop(block.key, None)) is not None:
            self.order.inherit(block, claim)

    def _take(self, block: StoredBlock) -> None:
        self.order.forget(block)
        self.order.remove(block.number)
        del self._files[block.key], self._blocks[block.number]
        self._num_bytes -= block.size

    def _remove(self, key: bytes) -> None:
        with self._lock:
            file = self._files.get(key)
            if file is None:
                return
            self._take(file)
        self._unlink(_name(key, file.owner))

    def _unlink(self, name: str) -> OSError | None:
        """Remove a file.  Returns why it is still there, as on a read-only disk."""
        try:
            os.unlink(self._folder / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            return error
        return None

    def _is_old(self, file: StoredBlock) -> bool:
        return abs(self._clock() - file.written) > self._max_age  # also in the future, after the clock was wrong


def make_folder(folder: Path) -> None:
    """Create the folder of a store.  Raises OSError: it cannot be created, or other users may enter or change it."""
    files.make_private(folder)
    if why := files.folder_objection(folder):
        raise OSError(errno.EPERM, f"{why}: its files are prompts")
    if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
        raise OSError(errno.EPERM, f"other users may enter it (mode {mode:o}), and its files are prompts: chmod 700 it")


def tenant_secret(folder: Path) -> bytes:
    """Returns the secret that keys tenants' names, created at first use, so that names survive a restart.

    Raises:
        OSError: the folder cannot be created or is open to other users, or its secret cannot be read or written.
    """
    make_folder(folder)
    path = folder / SECRET
    if not path.exists():
        files.write_whole(path, secrets.token_bytes(SECRET_BYTES), files.PRIVATE)
    if (objection := files.file_objection(path.lstat())) or path.stat().st_mode & 0o077:
        raise OSError(errno.EPERM, f"its file {SECRET} {objection or 'can be read by other users'}")
    secret = files.read_regular(path, SECRET_BYTES)
    if len(secret) != SECRET_BYTES:
        raise OSError(errno.EINVAL, f"its file {SECRET} is damaged: remove it; blocks of API keys are not found then")
    return secret


def _name(key: bytes, owner: str) -> str:
    return f"{key.hex()}-{owner}.kv"


def _on_disk(size: int) -> int:
    return -(-size // PAGE) * PAGE


class ContentKeys:
    """Content keys of blocks; processes agree on a key if the same tokens give the same bytes in both.

    Args:
        identity: all that determines a block's bytes except salt and tokens.
    """

    def __init__(self, identity: str) -> None:
        self._identity = hashlib.blake2b(identity.encode(), digest_size=KEY_BYTES).digest()

    def root(self, salt: str, adapter: str = "") -> bytes:
        """Returns the key before the first block; `adapter` is the digest of the adapter's factors."""
        return hashlib.blake2b(
            self._identity + repr((adapter, salt)).encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()

    @staticmethod
    def after(before: bytes, tokens: Sequence[int]) -> bytes:
        """Returns the key of the block with `tokens` that follows the block with the key `before`."""
        return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def owner_of(salt: str) -> str:
    """Returns the owner part of a file's name: a tenant's salts begin with its name (`api/generate/generate.py`)."""
    return hashlib.blake2b(salt.partition(":")[0].encode(errors="surrogatepass"), digest_size=OWNER_BYTES).hexdigest()


class _Published(NamedTuple):
    """Blocks that are to be written."""

    generation: int  # of the memory that they are in
    entries: Sequence[Entry]


class _Reading:
    """A request whose blocks are read; computing them instead is predicted to take `seconds`."""

    def __init__(self, request_id: int, keys: Sequence[bytes], seconds: float) -> None:
        self.request_id = request_id
        self.keys = keys  # of its first blocks, including those that are in memory already
        self.seconds = seconds
        self.num_bytes = 0
        self.num_arrived = 0  # blocks of the prompt
        self.blocks: Sequence[int] = ()  # cache blocks that its first blocks are read into
        self.is_cancelled = False
        self.is_over = False  # nothing more will be read
        self.began = 0.0  # seconds, monotonic
        self.until = 0.0  # when the request gives up and computes them, in the same seconds
        self.lock = threading.Lock()  # guards `is_cancelled`, and so what is written into its blocks


class Resting:
    """Called by a thread after each piece of work: sleeps `share` times its CPU time while requests run."""

    def __init__(self, scheduler: Scheduler, share: float) -> None:
        self._scheduler, self._share = scheduler, share
        self.slept = 0.0  # seconds
        self._worked = time.thread_time()

    def __call__(self) -> None:
        if self._scheduler.running:
            began = time.monotonic()
            time.sleep(self._share * (time.thread_time() - self._worked))
            self.slept += time.monotonic() - began
        self._worked = time.thread_time()


NOTHING = _Published(0, ())


class DiskLink(KVLink):
    """Writes published blocks, and reads those of new requests; the engine's thread calls it.

    Args:
        identity: all that determines a block's bytes except salt and tokens.
        place: called by each thread that copies blocks, before it begins.
        digest_of: returns the digest of an adapter's factors by its number; "" if the adapter is unknown.
    """

    def __init__(self, store: DiskStore, blocks: Blocks, scheduler: Scheduler, identity: str,
                 place: Callable[[], None] = lambda: None, digest_of: Callable[[int], str] = lambda number: "") -> None:
        self._store, self._blocks, self._scheduler, self._place = store, blocks, scheduler, place
        self._digest_of = digest_of
        self._keys = ContentKeys(identity)
        self._prefix = scheduler.kv.prefix
        self._new = self._prefix.new_entries = list[Entry]()
        self._limits: SchedulerLimits | None = None
        self._eviction_policy = ""  # not set
        self._claimed: list[tuple[Content, Claim]] = []
        self._follow_order()
        self._to_write: deque[_Published] = deque()  # new blocks of each step
        self._num_put = self._num_taken = 0  # blocks, by the engine's thread and by the writer
        self._generation = 0  # of the memory: blocks of an earlier one are lost
        self._awake = threading.Event()  # the writer waits for it while nothing runs
        self._is_parked = False  # set by the writer: it waits
        self._found: list[PrefixOnDisk] = []
        self._waiting: dict[int, _Reading] = {}  # by request, until their reads begin
        self._reading: dict[int, _Reading] = {}  # by request
        self._to_read: queue.SimpleQueue[_Reading | None] = queue.SimpleQueue()
        self._num_queued = 0  # bytes of all reads that have not ended
        self._arrivals: dict[int, ReceivedBlocks] = {}
        self._lock = threading.Lock()  # guards arrivals
        self._writing = threading.Lock()  # held while a file is written
        self._dead: set[str] = set()  # salts whose prompts were removed: their blocks are no longer written
        self._counted = DiskNews()
        self._counted_at, self._total_counted = 0.0, 0
        self._num_written = self._num_read = self._num_dropped = self._num_stale = self._num_failed = 0
        self._seconds_per_byte = dict(ASSUMED)
        self._measured = 0.0  # when it was, in seconds, monotonic; 0: never
        self._warning = ThrottledWarning(logger)
        self._is_closed = False
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in (
            ("kv-disk-write", self._write), ("kv-disk-read", self._read))]
        for thread in self._threads:
            thread.start()

    # -- new requests --------------------------------------------------------------------------------------------

    def offer(self, request: Request) -> None:
        """Look up which blocks of a new request are on disk."""
        num_full = (len(request.tokens) - 1) // self._scheduler.limits.block_size
        if request.kv is not None or request.computes_whole_prompt or not num_full or not len(self._store):
            return
        in_memory = self._prefix.chain(request.block_hashes, request.tokens, len(request.tokens) - 1)
        keys, first = [*map(self._key_of, in_memory)], len(in_memory)
        key = keys[-1] if keys else self._root(request.block_hashes.salt)
        if not key:
            return
        for tokens in self._prefix.tokens_of(request.block_hashes, request.tokens, num_full)[first:]:
            key = self._keys.after(key, tokens)
            if not self._store.has(key):
                break
            keys.append(key)
        if len(keys) == first:
            return
        self._store.use(keys)
        seconds, to_read = self._seconds_to_compute(first, len(keys)), self._seconds_to_read(len(keys) - first)
        if seconds <= to_read:
            return
        timeout = min(MOST_WAIT, max(LEAST_WAIT, UNKNOWN_WAIT * to_read if isinf(seconds) else seconds))
        self._waiting[request.request_id] = _Reading(request.request_id, keys, seconds)
        self._found.append(PrefixOnDisk(request.request_id, len(keys), timeout))

    def _seconds_to_compute(self, first: int, end: int) -> float:
        """Predicted seconds to compute blocks in steps of their own; infinite while the model of times is untrained."""
        times, limits = self._scheduler.times, self._scheduler.limits
        if not times.is_trained:
            return inf
        at, last, seconds = first * limits.block_size, end * limits.block_size, 0.0
        while at < last:
            count = min(limits.max_num_batched_tokens, last - at)
            seconds += times.seconds(work_of([at], [count]))
            at += count
        return seconds

    def _seconds_to_read(self, num_blocks: int) -> float:
        running = self._scheduler.running
        rate = self._seconds_per_byte[bool(running)]
        if time.monotonic() - self._measured > RATE_EXPIRY:
            rate = min(rate, ASSUMED[bool(running)])
        seconds = (self._num_queued + num_blocks * self._blocks.block_bytes) * rate
        if not running:
            return START_DELAY + seconds
        step = work_of([request.num_computed for request in running.values()], [1] * len(running))
        return self._scheduler.times.seconds(step) + seconds  # the read begins after the next step

    @property
    def num_unwritten(self) -> int:
        """Blocks that wait to be written, or are being written; some of them may be dropped."""
        return self._num_put - self._num_taken

    @property
    def has_news(self) -> bool:
        return bool(self._found or self._arrivals) or (
            time.monotonic() - self._counted_at > COUNT_INTERVAL and self._total() != self._total_counted)

    def _total(self) -> int:
        return (self._num_written + self._num_read + self._num_dropped + self._num_stale + self._num_failed
                + self._store.num_damaged)

    def pop_news(self) -> News:
        found, self._found = self._found, []
        with self._lock:
            arrivals, self._arrivals = self._arrivals, {}
        self._counted_at, self._total_counted = time.monotonic(), self._total()
        before, self._counted = self._counted, self._counts(self._counted)
        now = self._counted
        return News(disk=DiskNews(
            tuple(found), tuple(arrivals.values()), now.num_written - before.num_written,
            now.num_read - before.num_read, now.num_dropped - before.num_dropped,
            now.num_damaged - before.num_damaged, now.num_bytes))

    def _counts(self, before: DiskNews) -> DiskNews:
        return before._replace(
            num_written=self._num_written, num_read=self._num_read,
            num_dropped=self._num_dropped + self._num_stale + self._num_failed, num_damaged=self._store.num_damaged,
            num_bytes=self._store.num_bytes)

    # -- between a plan and its execution, and after it ----------------------------------------------------------

    def follow(self, transfers: KVTransfers, unwanted: Sequence[Request]) -> None:
        """Cancel reads of requests that no longer wait, and queue new blocks to be written."""
        if self._reading:
            waiting = {request.request_id for request in transfers.receiving()}
            for request_id in [name for name in self._reading if name not in waiting]:
                reading = self._cancel(request_id)
                now = time.monotonic()
                if not reading.is_over and request_id in self._scheduler.unfinished and (
                        now >= reading.until):  # it took too long: not merely preempted
                    self._measured = now
                    self._seconds_per_byte = dict.fromkeys(ASSUMED, (now - reading.began) / reading.num_bytes)
        if self._waiting:
            for request_id in [name for name in self._waiting if name not in self._scheduler.unfinished]:
                del self._waiting[request_id]
        if self._new:
            self._queue_new()
        self._follow_order()

    def _follow_order(self) -> None:
        """Keep the store's order of eviction, and its claims, as those of the cache in memory."""
        limits, order = self._scheduler.limits, self._scheduler.kv.pool.cached
        if limits is not self._limits and limits.eviction_policy != self._eviction_policy:
            self._eviction_policy = limits.eviction_policy
            self._claimed.clear()
            order.claims = self._claimed
            self._store.order_by(lambda tier: order_below(limits, tier, self._prefix, self._scheduler.times))
        if limits is not self._limits:
            self._store.share_is(limits.tenant_cache_share)
        self._limits = limits
        self._store.order.now = order.now
        for cached, claim in self._claimed:
            if isinstance(cached, CachedBlock) and (key := self._key_of(cached.entry)):
                self._store.claim(key, claim)
        self._claimed.clear()

    def _queue_new(self) -> None:
        new, self._new = self._new, []
        self._prefix.new_entries = self._new
        room = MAX_PENDING - self.num_unwritten
        if len(new) > room:
            new = [entry for entry in new if not self._store.has(self._key_of(entry))]
            self._num_dropped += max(0, len(new) - room)
            new = new[:room]
        if new:
            self._num_put += len(new)
            self._to_write.append(_Published(self._generation, new))
            if self._is_parked:
                self._awake.set()

    def _key_of(self, entry: Entry) -> bytes:
        """Returns the content key of an entry; b"" if it cannot be known because an entry before it is gone."""
        chain: list[Entry] = []
        above: Entry | None = entry
        while above is not None and not above.content_key:
            chain.append(above)
            above = above.parent
        key = above.content_key if above is not None else b""
        for one in reversed(chain):
            if one.tokens:
                key = self._keys.after(key, one.tokens) if key else b""
            elif one.position == 0 and one.parent is None:  # the root of its salt
                key = self._root(one.salt)
            if key:  # an entry whose predecessor is gone may have had its key by another thread before
                one.content_key = key
        return key

    def _root(self, text: str) -> bytes:
        """Returns the content key before the first block of a namespace; b"" if its adapter is unknown."""
        _, adapter, salt = Namespace.of(text)
        digest = self._digest_of(adapter) if adapter else ""
        return b"" if adapter and not digest else self._keys.root(salt, digest)

    def begin(self, transfers: KVTransfers) -> None:
        """Begin to read for requests that have been given blocks."""
        if not self._waiting:
            return
        for request in transfers.receiving():
            reading = self._waiting.pop(request.request_id, None)
            if reading is None:
                continue
            reading.num_arrived = transfers.first_missing(request)
            reading.blocks = request.blocks[: len(reading.keys)]
            reading.num_bytes = (len(reading.keys) - reading.num_arrived) * self._blocks.block_bytes
            self._num_queued += reading.num_bytes
            reading.began, reading.until = time.monotonic(), request.kv_until
            self._reading[request.request_id] = reading
            self._to_read.put(reading)

    def _cancel(self, request_id: int) -> _Reading:
        reading = self._reading.pop(request_id)
        with reading.lock, self._lock:
            reading.is_cancelled = True
            self._arrivals.pop(request_id, None)
        self._num_queued -= reading.num_bytes
        return reading

    # -- the end -------------------------------------------------------------------------------------------------

    def lose_memory(self) -> None:
        """The contents of all blocks are about to be lost; no request is unfinished."""
        self._generation += 1
        self._new.clear()

    def remove(self, tenant: str | None = None) -> Callable[[], int]:
        """Stop writing blocks of a tenant's prompts, or of all, including those of unfinished requests.

        Returns a function that removes their files, on any thread, and returns their number.
        """
        owner = None if tenant is None else owner_of(tenant)
        known = {*self._prefix.salts, *[one.block_hashes.salt for one in self._scheduler.requests()]}
        self._dead = (self._dead & known) | {
            salt for salt in known if owner in (None, owner_of(Namespace.of(salt).salt))}

        def remove_files() -> int:
            with self._writing:  # a file in progress is in the index after this, and no other one will be
                pass
            return self._store.remove_all(owner)

        return remove_files

    def close(self) -> None:
        """End the threads, which refer to the cache, and release the folder."""
        if self._is_closed:
            return
        self._is_closed = True
        self._prefix.new_entries = self._scheduler.kv.pool.cached.claims = None
        self.lose_memory()
        for request_id in list(self._reading):
            self._cancel(request_id)
        self._awake.set()
        self._to_read.put(None)
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT)
        self._store.close()

    # -- the writer ----------------------------------------------------------------------------------------------

    def _write(self) -> None:
        self._place()
        go_last()
        _set_idle_io()
        buffer = bytearray(HEADER.size + self._blocks.block_bytes)
        expired_at, failures, paused_until = time.monotonic(), 0, 0.0
        while not self._is_closed:
            self._await_blocks(expired_at + EXPIRY_INTERVAL)
            if time.monotonic() - expired_at >= EXPIRY_INTERVAL:
                self._store.expire()
                expired_at = time.monotonic()
            generation, entries = self._to_write.popleft() if self._to_write else NOTHING
            for entry in entries:
                if self._is_closed:
                    return
                try:
                    if self._write_block(entry, generation, buffer, is_paused=time.monotonic() < paused_until):
                        failures = 0
                except OSError as error:
                    self._num_failed, failures = self._num_failed + 1, failures + 1
                    paused_until = time.monotonic() + min(LONGEST_PAUSE, 2.0**failures)
                    self._warning.warn(f"blocks of the prefix cache are not written to disk: {described(error)}")
                self._num_taken += 1

    def _await_blocks(self, until: float) -> None:
        """Return as soon as there are blocks to write, or at a time."""
        while not (self._to_write or self._is_closed) and (left := until - time.monotonic()) > 0:
            if self._scheduler.running:
                time.sleep(WRITER_INTERVAL)
                continue
            self._awake.clear()
            self._is_parked = True
            if not (self._to_write or self._is_closed):  # else they came before the engine's thread saw that it waits
                self._awake.wait(left)
            self._is_parked = False

    def _write_block(self, entry: Entry, generation: int, buffer: bytearray, *, is_paused: bool) -> bool:
        """Write a published block; returns whether it was.  Raises OSError as `DiskStore.write`.

        Args:
            is_paused: it counts as one that failed.
        """
        if self._is_stale(entry, generation):
            self._num_stale += 1
            return False
        key = self._key_of(entry)
        if not key or self._store.has(key):  # another request with the same prompt wrote it
            return False
        if is_paused:
            self._num_failed += 1
            return False
        parent, cached = entry.parent, entry.cached
        rest = Resting(self._scheduler, REST / CATCH_UP if self.num_unwritten > MAX_PENDING // 2 else REST)
        block = cached[0].block if cached else NOWHERE
        if block != NOWHERE:
            self._blocks.read(block, memoryview(buffer)[HEADER.size:])
            rest()
        with self._writing:
            if block == NOWHERE or self._is_stale(entry, generation):  # else the buffer has the bytes of another block
                self._num_stale += 1
                return False
            self._store.write(key, owner_of(Namespace.of(entry.salt).salt), buffer,
                              parent.content_key if parent is not None else b"", rest)
        self._num_written += 1
        return True

    def _is_stale(self, entry: Entry, generation: int) -> bool:
        """Whether a block left the memory where it was published, or must no longer be written."""
        cached = entry.cached  # the engine's thread may replace it meanwhile
        return (not cached or cached[0].was_vacated or generation != self._generation or entry.salt in self._dead)

    # -- the reader ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        self._place()
        go_last()
        buffer = bytearray(HEADER.size + self._blocks.block_bytes)
        while (reading := self._to_read.get()) is not None:
            if not reading.is_cancelled:
                self._read_all(reading, buffer)

    def _read_all(self, reading: _Reading, buffer: bytearray) -> None:
        began = reported = time.monotonic()
        first, failure, rest = reading.num_arrived, "", Resting(self._scheduler, REST)
        for index in range(first, len(reading.keys)):
            if not self._store.read(reading.keys[index], buffer, rest):
                failure = "a block is not on disk any more, or is damaged"
                break
            with reading.lock:
                if reading.is_cancelled:
                    return
                self._blocks.write(reading.blocks[index], memoryview(buffer)[HEADER.size:])
                reading.num_arrived = index + 1
            self._num_read += 1
            rest()
            now = time.monotonic()
            left = (len(reading.keys) - index - 1) * (now - began) / (index + 1 - first)
            if left and now - began + left > max(REPORT_INTERVAL, reading.seconds):
                failure = "it is slower than predicted"
                break
            if now - reported > REPORT_INTERVAL:
                self._report(reading, is_last=False)
                reported = now
        if reading.num_arrived > first:
            rate = (time.monotonic() - began) / ((reading.num_arrived - first) * self._blocks.block_bytes)
            rates, is_shared = self._seconds_per_byte, rest.slept > 0
            rates[is_shared] = (rates[is_shared] + rate) / 2 if self._measured else rate
            self._measured = time.monotonic()
        self._report(reading, is_last=True, failure=failure)

    def _report(self, reading: _Reading, *, is_last: bool, failure: str = "") -> None:
        with self._lock:
            reading.is_over |= is_last
            if not reading.is_cancelled:
                self._arrivals[reading.request_id] = ReceivedBlocks(
                    reading.request_id, reading.num_arrived, is_last, failure)


IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # system call numbers
THREAD, IDLE = 1, 3 << 13  # ioprio_set's IOPRIO_WHO_PROCESS, where 0 is the calling thread, and IOPRIO_CLASS_IDLE


def _set_idle_io() -> None:
    """Give this thread the lowest I/O priority, on systems that have I/O priorities."""
    if sys.platform == "linux" and (number := IOPRIO_SET.get(platform.machine())) is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, THREAD, 0, IDLE)


