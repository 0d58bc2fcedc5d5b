"""The index that routers are told equals the engine's prefix cache: a lookup in it says what the next request hits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import Work
from slotwise.engine.messages import Add, Observer
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.pace import CostPace
from slotwise.measure.simulate.simulator import Server, Setup
from slotwise.observe.prefix_index import MAX_CHANGES, MAX_OF_BLOCK, PrefixIndex

BLOCK = 4
LIMITS = SchedulerLimits(max_model_len=96, num_blocks=40, block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=16,
                         enable_prefix_caching=True)


def cost(work: Work) -> float:
    return 0.01


class Hits(Observer):
    """Of each admitted request, the cached tokens at its first admission; and the copies from host memory."""

    def __init__(self) -> None:
        self.cached: dict[str, int] = {}
        self.num_loads = 0

    def stepped(self, record) -> None:
        self.num_loads += len(record.plan.loads)
        for request_id, cached in record.admitted:
            self.cached.setdefault(request_id, cached)


class Router:
    """Knows what an index tells, by its changes only."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index, self.pieces, self.instance, self.version = index, set(), "", 0

    def ask(self) -> None:
        changes = self.index.changes(self.instance, self.version)
        if changes.is_whole:
            self.pieces.clear()
        self.pieces |= set(changes.added)
        self.pieces -= set(changes.removed)
        self.instance, self.version = self.index.instance, changes.version

    def hit(self, pieces: tuple[int, ...]) -> int:
        return next((length for length, piece in enumerate(pieces) if piece not in self.pieces), len(pieces))


def pieces_of(prompt: list[int]) -> tuple[int, ...]:
    return tuple([hash(tuple(prompt[:end])) & (1 << 48) - 1 for end in range(BLOCK, len(prompt) + 1, BLOCK)])


class Play:
    def __init__(self, seed: int, limits: SchedulerLimits = LIMITS) -> None:
        self.rng, self.index, self.hits = Random(seed), PrefixIndex(), Hits()
        self.server = Server(Setup(limits, Scheduling(Batching(), max_num_seqs=4, max_num_batched_tokens=16),
                                   CostPace(cost)), None,
                             [self.index, self.hits])
        self.router, self.sent = Router(self.index), 0

    def prompt(self) -> list[int]:
        """One of a few beginnings, and an end of its own."""
        rng = self.rng
        return [rng.randrange(3)] * rng.choice((0, 8, 16, 24)) + [rng.randrange(9) for _ in range(rng.randint(1, 24))]

    def send(self, prompt: list[int]) -> str:
        name, self.sent = f"r{self.sent}", self.sent + 1
        params = SamplingSpec(max_tokens=self.rng.randint(1, 12), ignore_eos=True)
        self.server.ask(self.server.machine.now, Add(name, RequestSpec(prompt, params)))
        self.index.expect(name, (len(prompt), pieces_of(prompt)), len(prompt), BLOCK)
        return name

    def run(self) -> None:
        self.server.run_until(float("inf"), 100_000)


@pytest.mark.parametrize("seed", range(8))
def test_the_index_says_what_the_next_request_hits(seed: int) -> None:
    play, found = Play(seed), 0
    for _ in range(120):
        for _ in range(play.rng.randint(0, 6)):  # at once, in a cache that cannot hold them all
            play.send(play.prompt())
        play.run()
        if play.rng.random() < 0.5:
            play.router.ask()
        prompt = play.prompt()
        play.router.ask()
        predicted = min(play.router.hit(pieces_of(prompt)), (len(prompt) - 1) // BLOCK) * BLOCK
        name = play.send(prompt)
        play.run()
        assert play.hits.cached[name] == predicted, name
        found += predicted > 0
    assert 30 < found < 115  # neither always nor never


@pytest.mark.parametrize("seed", range(4))
def test_the_index_names_nothing_that_was_lost_below_host_memory(seed: int) -> None:
    """Blocks that are copied from host memory replace what was in the device's blocks."""
    play, num_found = Play(seed, replace(LIMITS, num_host_blocks=16)), 0
    for _ in range(60):
        for _ in range(play.rng.randint(0, 6)):
            play.send(play.prompt())
        play.run()
        prompt = play.prompt()
        play.router.ask()
        predicted = min(play.router.hit(pieces_of(prompt)), (len(prompt) - 1) // BLOCK) * BLOCK
        name = play.send(prompt)
        play.run()
        assert play.hits.cached[name] >= predicted, name
        num_found += predicted > 0
    assert num_found > 15 and play.hits.num_loads > 15


def test_an_engine_without_a_prefix_cache_has_no_index() -> None:
    play = Play(0)
    play.index.started(type("Info", (), {"limits": replace(LIMITS, enable_prefix_caching=False)})())
    play.send([1] * 32)
    play.run()
    assert play.index.changes("", 0).added == []


def test_a_new_engine_has_an_empty_cache() -> None:
    play = Play(0)
    play.send([1] * 32)
    play.run()
    play.router.ask()
    assert len(play.router.pieces) == 8
    play.index.started(type("Info", (), {"limits": LIMITS})())
    play.router.ask()
    assert play.router.pieces == set()


def test_an_adapter_takes_the_pieces_of_its_prompts_with_it() -> None:
    play = Play(0)
    for name, prompt, adapter in (("base", [1] * 16, 0), ("one", [2] * 16, 1), ("other", [3] * 16, 2)):
        play.server.ask(play.server.machine.now,
                        Add(name, RequestSpec(prompt, SamplingSpec(max_tokens=1), adapter=adapter)))
        play.index.expect(name, (16, pieces_of(prompt)), 16, BLOCK, adapter)
    play.run()
    play.router.ask()
    assert [play.router.hit(pieces_of([token] * 16)) for token in (1, 2, 3)] == [4, 4, 4]
    play.index.adapters_are({2, 3})
    play.router.ask()
    assert [play.router.hit(pieces_of([token] * 16)) for token in (1, 2, 3)] == [4, 0, 4]
    for number in range(12):  # other prompts take the blocks of all
        play.send([number + 20] * 32)
        play.run()
    play.index.adapters_are(())
    play.router.ask()
    assert [play.router.hit(pieces_of([token] * 16)) for token in (1, 2, 3)] == [0, 0, 0]


def test_a_tenants_prompts_are_forgotten_with_those_in_progress() -> None:
    play = Play(0)
    for name, tenant, token in (("a", "one", 1), ("b", "two", 2), ("c", "one", 3)):
        prompt = [token] * 32
        play.server.ask(play.server.machine.now, Add(name, RequestSpec(prompt, SamplingSpec(max_tokens=1))))
        play.index.expect(name, (32, pieces_of(prompt)), 32, BLOCK, tenant=tenant)
        if name == "b":
            play.run()
            play.router.ask()
    assert play.router.hit(pieces_of([1] * 32)) == 8
    play.index.forget("one")
    play.run()
    play.router.ask()
    assert [play.router.hit(pieces_of([token] * 32)) for token in (1, 2, 3)] == [0, 8, 0]


def test_a_router_that_missed_changes_gets_the_whole_index() -> None:
    play = Play(0)
    play.send([1] * 32)
    play.run()
    for instance, since in (("another", 8), (play.index.instance, 99), ("", 0)):
        changes = play.index.changes(instance, since)
        assert changes.is_whole and sorted(changes.added) == sorted(pieces_of([1] * 32)) and not changes.removed
    assert play.index.changes(play.index.instance, 8) == (8, [], [], False)
    index = PrefixIndex()
    index._changes.extend((piece, True) for piece in range(MAX_CHANGES + 5))
    index._version = MAX_CHANGES + 5
    assert index.changes(index.instance, 4).is_whole and not index.changes(index.instance, 5).is_whole


def test_texts_and_tokens_of_different_lengths_are_matched_by_their_shares() -> None:
    play = Play(0)
    prompt = [2] * 32
    play.server.ask(0.0, Add("a", RequestSpec(prompt, SamplingSpec(max_tokens=1))))
    play.index.expect("a", (1000, tuple(range(3))), 32, 256)  # a piece is 8.2 tokens
    play.run()
    assert sorted(play.index.changes("", 0).added) == [0, 1, 2]
    assert play.index.piece_tokens == pytest.approx(32 * 256 / 1000)
    short = Play(0)
    short.server.ask(0.0, Add("b", RequestSpec([1, 2], SamplingSpec(max_tokens=1))))
    short.index.expect("b", (600, (7, 8)), 2, 256)  # less than a block is never cached
    short.run()
    assert short.index.changes("", 0).added == []


def test_the_ends_of_many_prompts_behind_a_shared_block_are_forgotten() -> None:
    """A digest that ends within a block counts as the one before, which is never given to others."""
    play = Play(0)
    for number in range(5 * MAX_OF_BLOCK):
        prompt = [1] * 8 + [number + 2, 3]
        play.server.ask(play.server.machine.now, Add(str(number), RequestSpec(prompt, SamplingSpec(max_tokens=1))))
        play.index.expect(str(number), (10, (*pieces_of(prompt), 1000 + number)), 10, 2)
        play.run()
    play.router.ask()
    assert len(play.router.pieces) <= MAX_OF_BLOCK + 2 and 1000 + number in play.router.pieces
    assert max(map(len, play.index._pieces_of.values())) == MAX_OF_BLOCK
    play.index.forget("")
    play.router.ask()
    assert not play.router.pieces
