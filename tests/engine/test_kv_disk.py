"""Blocks on disk: a block that is found has the bits that were computed, and damage to files costs only cache hits.

The executor's cache contains digests of all tokens before a position, so a wrong block fails an assertion there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.apart import LIMITS, Side
from support.live_server import eventually
from support.records import admitted_of, cached_of
from support.toy import alone, in_seed, request

from slotwise.core.cache_causes import FOUND, FOUND_ON_DISK
from slotwise.core.eviction import Claim
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import COST, EVICTION_POLICIES, HINTED, LRU, OBEYING, PREDICTED
from slotwise.core.step_time import work_of
from slotwise.engine import kv_disk
from slotwise.engine.kv_disk import HEADER, MAX_CLAIMS, ContentKeys, DiskLink, DiskStore, owner_of, tenant_secret
from slotwise.engine.messages import UNSUBMITTED, Add
from slotwise.measure.simulate.replay import replay

PROMPT = [(7 * index) % 23 for index in range(50)]
NUM_FULL = len(PROMPT) // LIMITS.block_size
DAY = 86_400.0


class Stored(Side):
    """An engine with blocks on disk."""

    def __init__(self, folder: Path, identity: str = "toy", most: int = 1 << 20, max_age: float = DAY,
                 adapters: Mapping[int, str] | None = None, policy: str = LRU, num_host_blocks: int = 0) -> None:
        super().__init__(replace(LIMITS, eviction_policy=policy, num_host_blocks=num_host_blocks))
        self.store = DiskStore(folder, self.blocks.block_bytes, most, max_age)
        self.disk = DiskLink(self.store, self.blocks, self.scheduler, identity,
                             digest_of=lambda number: (adapters or {}).get(number, ""))
        self.engine._kv_link = self.disk

    def ask(self, name: str, prompt: list[int], salt: str = "", max_tokens: int = 8, **fields: Any) -> None:
        spec = RequestSpec(prompt, SamplingSpec(max_tokens=max_tokens), salt=salt, **fields)
        self.handle(Add(UNSUBMITTED, spec, name=name))

    def run(self, name: str, prompt: list[int], salt: str = "", **fields: Any) -> int:
        """Runs a request to its end and checks its tokens; returns how many of its prompt tokens were cached."""
        self.ask(name, prompt, salt, **fields)
        self.finish()
        assert self.tokens[name] == alone(request("alone", prompt), LIMITS)
        number = self.names.index(name)
        return next(cached_of(record)[admitted_of(record).index(number)] for record in self.records
                    if number in admitted_of(record))

    def finish(self, until: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + 120
        while self.engine.has_work and not until():
            if not self.step():
                time.sleep(0.0005)
            assert time.monotonic() < end, "the engine hangs"

    def written(self) -> None:
        """Waits until all blocks are written or dropped."""
        eventually(lambda: not self.disk.num_unwritten)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Stored]]:
    """Starts an engine on the folder, after closing the previous one."""
    made: list[Stored] = []

    def start(**settings: object) -> Stored:
        for side in made:
            side.disk.close()
        made.append(Stored(tmp_path / "blocks", **settings))
        return made[-1]

    yield start
    for side in made:
        side.disk.close()


def files_in(folder: Path) -> list[Path]:
    return sorted((folder / "blocks").glob("*.kv"))


def test_a_restart_finds_the_blocks_and_a_replay_needs_no_disk(make, tmp_path):
    first = make()
    assert first.run("a", PROMPT) == 0
    first.written()
    assert len(files_in(tmp_path)) == (len(PROMPT) + 8 - 1) // LIMITS.block_size
    assert {path.stat().st_mode & 0o777 for path in files_in(tmp_path)} == {0o600}
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o700

    second = make()
    assert second.run("short", [*PROMPT[:13], 22, 1, 2, 3]) == 12
    assert second.run("a", PROMPT) == 4 * NUM_FULL
    assert second.num_computed == 5 + len(PROMPT) - 4 * NUM_FULL
    (spans,) = [lookup.spans for record in second.records for lookup in record.lookups if lookup.request_id == 1]
    assert [(span.end, span.cause) for span in spans[:2]] == [(12, FOUND), (48, FOUND_ON_DISK)]
    assert sum(one.inputs.disk.num_read for one in second.records if one.inputs.disk) == NUM_FULL
    second.scheduler.check()
    assert second.scheduler.num_free_blocks == LIMITS.num_blocks
    outcome = replay(second.log.entries)
    assert outcome.difference is None and outcome.records == len(second.records)


def test_an_evicted_prompt_is_found_and_other_salts_and_engines_find_nothing(make):
    side = make()
    side.run("a", PROMPT, "tenant:salt")
    side.written()
    for number in range(6):
        side.run(f"other {number}", [number + 1] * 60)
    assert side.scheduler.kv.prompts._evicted and side.run("again", PROMPT, "tenant:salt") == 48
    assert side.run("b", PROMPT, "tenant") == side.run("c", PROMPT, "tenant:salt2") == 0
    side.written()
    assert make(identity="another checkpoint").run("d", PROMPT, "tenant:salt") == 0
    assert make().run("e", PROMPT, "tenant:salt") == 48


@pytest.mark.parametrize("is_evicted", [True, False])
def test_blocks_that_leave_memory_while_they_are_copied_are_not_written(make, tmp_path, monkeypatch, is_evicted):
    side = make(num_host_blocks=200)  # so that evicted blocks are still known
    goes_on, read = threading.Event(), side.blocks.read
    monkeypatch.setattr(side.blocks, "read", lambda *what: goes_on.wait(60) and read(*what))
    side.run("a", PROMPT)
    if is_evicted:
        for number in range(6):
            side.run(f"other {number}", [number + 1] * 60)
    else:
        side.disk.lose_memory()
    goes_on.set()
    side.written()
    assert bool(files_in(tmp_path)) == is_evicted and make().run("again", PROMPT) == 0


def test_blocks_that_cannot_be_removed_are_reported_and_not_found(make, monkeypatch):
    side = make()
    side.run("a", PROMPT)
    side.written()

    def unlink(path: object) -> None:
        raise OSError(errno.EROFS, "the disk is read-only")

    with monkeypatch.context() as patched:
        patched.setattr(kv_disk.os, "unlink", unlink)
        with pytest.raises(OSError, match="14 of 14 blocks stay on disk: the disk is read-only"):
            side.engine.remove_stored()()
    assert not len(side.store) and side.store.num_bytes == 0


def test_an_adapter_is_known_by_what_its_files_hold(make, tmp_path):
    side = make(adapters={1: "a digest"})
    side.run("unknown", PROMPT[::-1], adapter=2)
    side.written()
    assert not files_in(tmp_path)
    side.run("a", PROMPT, adapter=1)
    side.written()
    side = make(adapters={1: "another", 5: "a digest"})
    assert [side.run(f"adapter {number}", PROMPT, adapter=number) for number in (0, 1, 5)] == [0, 0, 48]


@pytest.mark.parametrize("harm", ["cut", "changed", "swapped", "empty", "link", "gone", "grown"])
def test_a_file_that_is_not_what_its_name_says_is_a_miss(make, tmp_path, harm):
    side = make()
    side.run("a", PROMPT)
    side.written()
    keys = list(side.store._files)
    paths = [tmp_path / "blocks" / kv_disk._name(key, owner_of("")) for key in keys]
    (tmp_path / "blocks" / "notes.txt").write_text("foreign")
    harmed, data = paths[5], paths[5].read_bytes()
    harmed.unlink()
    if harm == "link":
        harmed.symlink_to(paths[6])
    elif harm != "gone":
        harmed.write_bytes({
            "cut": data[:-1], "changed": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "empty": b"",
            "swapped": paths[6].read_bytes(), "grown": data + b"x"}[harm])
    again = make()
    assert again.run("a", PROMPT) == (5 * 4 if harm not in ("link", "gone") else 20)
    if harm not in ("link", "gone"):  # these are not in the index
        assert again.store.num_damaged == 1
    else:
        assert again.store.num_damaged == 0
    again.written()
    assert harmed.read_bytes() == data  # computed again, and written again
    assert (tmp_path / "blocks" / "notes.txt").read_text() == "foreign"


def test_a_hundred_requests_with_evictions_aborts_and_damage_get_their_tokens(make, tmp_path):
    for seed, policy in enumerate((LRU, COST, PREDICTED)):
        with in_seed(seed):
            draw, side = Random(seed), make(most=40 * 4096, policy=policy)
            stems = [[draw.randrange(1, 23) for _ in range(48)] for _ in range(4)]
            for number in range(40):
                stem = draw.choice(stems)
                prompt = [*stem[: draw.randrange(8, 49)], *[draw.randrange(1, 23) for _ in range(draw.randrange(8))]]
                side.ask(f"r{number}", prompt, draw.choice(["", "a", "a:b"]), draw.randrange(1, 9),
                         retain=draw.choice((0.0, 1e6)), session=draw.choice(("", "one")))
                for _ in range(draw.randrange(4)):
                    side.step()
                if draw.random() < 0.1:
                    side.abort(f"r{draw.randrange(number + 1)}")
                if draw.random() < 0.2 and (paths := files_in(tmp_path)):
                    # The file may be removed meanwhile.
                    with contextlib.suppress(FileNotFoundError), draw.choice(paths).open("r+b") as file:
                        file.seek(draw.randrange(HEADER.size + 30))
                        file.write(b"\xff\x00")
            side.finish()
            side.scheduler.check()
            assert side.scheduler.num_free_blocks == LIMITS.num_blocks
            assert side.store.num_bytes <= 40 * 4096 and len(side.store.order) == len(side.store)
            assert replay(side.log.entries).difference is None


def test_the_size_is_kept_by_removing_what_was_used_longest_ago(make, tmp_path):
    side = make(most=30 * 4096)
    side.run("a", PROMPT)
    side.run("b", PROMPT[::-1])
    side.written()
    assert len(files_in(tmp_path)) == len(side.store) == 28
    side = make(most=30 * 4096)
    assert side.run("a", PROMPT) == 48  # used again
    side.run("c", [5, *PROMPT])
    side.written()
    assert len(files_in(tmp_path)) == 30 and side.store.num_bytes == 30 * 4096
    side = make(most=30 * 4096)
    assert side.run("a", PROMPT) == 48
    assert side.run("b", PROMPT[::-1]) < 48
    with pytest.raises(OSError, match="raise kv_disk_size"):
        make(most=100)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_files_go_in_the_order_of_eviction_continuations_first(make, tmp_path, policy):
    side = make(most=40 * 4096, policy=policy)
    side.run("kept", PROMPT, retain=1e6)
    side.run("branch", [*PROMPT[:24], 1, 1, 1, 1, 1])
    for number in range(3):
        side.run(f"n{number}", [number + 1, *PROMPT[::-1]])
        side.written()
        assert all(one.before is None or side.store.has(one.before.key) for one in side.store._files.values())
    assert len(files_in(tmp_path)) == 40
    found = make(most=40 * 4096, policy=policy).run("again", PROMPT)
    assert found == 48 if policy in OBEYING else found < 48


def test_a_flood_of_claims_on_blocks_that_are_never_written_drops_no_other_tenants(make):
    store = make(policy=HINTED).store
    for number, tenant in enumerate(["light", *["flood"] * 2 * MAX_CLAIMS]):
        store.claim(number.to_bytes(32), Claim(1e9, 1.0, tenant, is_hint=True))
    for number in (0, 1, 2 * MAX_CLAIMS):
        store.write(number.to_bytes(32), owner_of(""), bytearray(HEADER.size + store.block_bytes))
    assert {one.tenant for one in store.order._claims.values()} == {"light", "flood"}
    assert len(store.order._claims) == 2, "the oldest of the flood is gone"


def test_old_files_are_removed_and_never_found(make, tmp_path):
    side = make()
    side.run("a", PROMPT)
    side.written()
    for path in files_in(tmp_path):
        os.utime(path, (time.time(), time.time() - 50))
    unfinished = tmp_path / "blocks" / ".0123456789abcdef.unfinished"
    unfinished.write_bytes(b"of a killed process")
    side.disk.close()
    store = DiskStore(tmp_path / "blocks", side.blocks.block_bytes, 1 << 20, 100)
    keys = list(store._files)
    assert len(keys) == 14 and all(map(store.has, keys)) and not unfinished.exists()
    store._clock = lambda: time.time() + 60
    assert not any(map(store.has, keys)) and not store.read(keys[0], bytearray(HEADER.size + side.blocks.block_bytes))
    store.expire()
    assert not files_in(tmp_path) and not store.num_bytes
    store.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_costs_no_request(make, tmp_path, monkeypatch, error):
    side = make()

    def refused(descriptor: int, data: memoryview) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(kv_disk.os, "write", refused)
    monkeypatch.setattr(kv_disk, "COUNT_INTERVAL", 0.0)
    assert side.run("a", PROMPT) == 0
    side.written()
    side.run("b", PROMPT[::-1])
    assert not list((tmp_path / "blocks").iterdir())
    dropped = sum(one.inputs.disk.num_dropped for one in side.records if one.inputs.disk)
    assert dropped and side.disk._num_failed >= dropped and not side.disk._num_written


def test_a_disk_that_does_not_answer_delays_one_request_by_a_bounded_time(make, monkeypatch):
    side = make()
    side.run("a", PROMPT)
    side.run("c", PROMPT[::-1])
    side.written()
    side = make()
    side.scheduler.times.learn(work_of([0], [16]), 0.001)
    answers, read = threading.Event(), side.store._read
    monkeypatch.setattr(side.store, "_read", lambda *which: answers.wait() and read(*which))
    monkeypatch.setattr(side.disk, "_seconds_to_compute", lambda first, end: 0.05)
    begin = side.disk.begin
    monkeypatch.setattr(side.disk, "begin", lambda transfers: time.sleep(0.02) or begin(transfers))  # a busy machine
    try:
        assert side.run("a", PROMPT) == 0
        assert side.run("b", [*PROMPT[:40], 1]) == 40  # of what was computed meanwhile
        assert side.run("c", PROMPT[::-1]) == 0  # on disk as well, and not tried
        found = [one.request_id for record in side.records if record.inputs.disk for one in record.inputs.disk.found]
        assert found == [0]
    finally:
        answers.set()


def test_blocks_are_not_read_where_computing_is_predicted_to_be_quicker(make):
    side = make()
    side.run("a", PROMPT)
    side.written()
    side = make()
    side.scheduler.times.learn(work_of([0], [16]), 1e-6)
    assert side.run("a", PROMPT) == 0
    side = make()
    side.scheduler.times.learn(work_of([0], [16]), 60.0)
    assert side.run("a", PROMPT) == 48


def test_blocks_of_a_tenant_are_removed_with_those_of_its_unfinished_requests(make, tmp_path):
    side = make()
    for salt in ("one", "one:salt", "two"):
        side.run(salt, PROMPT, salt)
    side.written()
    assert len(files_in(tmp_path)) == 3 * 14
    side.ask("unfinished", PROMPT[::-1], "one")
    side.finish(until=lambda: side.disk._num_put > 3 * 14 + 2)
    remove = side.engine.remove_stored("one")
    side.finish()
    assert remove() >= 2 * 14
    side.written()
    assert {path.stem[-16:] for path in files_in(tmp_path)} == {owner_of("two")}
    assert [make().run("later", PROMPT, salt) for salt in ("one", "one:salt", "two")][:2] == [0, 0]
    side = make()
    assert side.run("two", PROMPT, "two") == 48
    assert side.engine.remove_stored()() >= 14 and not files_in(tmp_path)


def test_two_engines_cannot_use_one_folder_nor_one_that_others_may_enter(make, tmp_path):
    make()
    with pytest.raises(OSError, match="another engine uses it"):
        Stored(tmp_path / "blocks")
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    for use in (lambda: DiskStore(tmp_path / "open", 64, 1 << 20, DAY), lambda: tenant_secret(tmp_path / "open")):
        with pytest.raises(OSError, match="chmod 700"):
            use()


def test_tenants_keep_their_names_by_a_secret_of_the_folder(tmp_path):
    secret = tenant_secret(tmp_path / "blocks")
    assert len(secret) == 32 and tenant_secret(tmp_path / "blocks") == secret != tenant_secret(tmp_path / "other")
    assert (tmp_path / "blocks" / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "blocks" / "secret").write_bytes(b"short")
    with pytest.raises(OSError, match="damaged"):
        tenant_secret(tmp_path / "blocks")


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from slotwise.engine import kv_disk
from slotwise.engine.kv_disk import HEADER, DiskStore

SIZE = 200_000
kv_disk.PIECE = 1 << 16  # a block is read and written in several pieces
def block(number):
    return number.to_bytes(8, "big") * (SIZE // 8)

def store():
    return DiskStore(Path(sys.argv[1]), SIZE, 10 * (SIZE + 8192), 86400.0)

def write_on(first):
    kept = store()
    for number in range(first, first + 10_000):
        kept.write(number.to_bytes(32, "big"), "0" * 16, bytearray(HEADER.size) + block(number))

store().close()
buffer, num_read, num_unfinished = bytearray(HEADER.size + SIZE), 0, 0
draw = random.Random(int(sys.argv[2]))
for round in range(200):
    before = set(os.listdir(sys.argv[1]))
    pid = os.fork()
    if not pid:
        write_on(round * 10_000)
        os._exit(0)
    while set(os.listdir(sys.argv[1])) == before:
        time.sleep(0.0002)
    time.sleep(draw.random() * 0.004)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    num_unfinished += any(name.startswith(".") for name in os.listdir(sys.argv[1]))
    kept = store()
    assert not any(name.startswith(".") for name in os.listdir(sys.argv[1])) and len(kept) <= 10
    for key in list(kept._files)[-3:]:
        assert kept.read(key, buffer), "a whole file was refused"
        assert buffer[HEADER.size:] == block(int.from_bytes(key, "big")), "another block was read"
        num_read += 1
    kept.close()
print(num_read, num_unfinished)
"""


def test_a_process_killed_at_200_moments_leaves_nothing_wrong(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "blocks"), "1"], capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stderr
    num_read, num_unfinished = map(int, done.stdout.split())
    assert num_read > 200 and num_unfinished > 0  # it was killed while it wrote


def test_keys_depend_on_everything():
    roots = {ContentKeys(identity).root(salt) for identity in ("a", "b") for salt in ("", "x", "x:y")}
    assert len(roots) == 6
    assert len({ContentKeys.after(root, tokens) for root in roots for tokens in ((1, 2), (2, 1), (1,))}) == 18
