"""Sessions replayed under each order of eviction: the bound from hindsight is one, and what-ifs know prefixes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import pytest

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import EVICTION_POLICIES, HINTED, LRU, PREDICTED, SLOTS, SchedulerLimits
from slotwise.core.step_time import Work
from slotwise.engine.messages import Add
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.eviction_replay import _chain, compare, figures_of, hindsight, run_sessions, working_set
from slotwise.measure.simulate.figures import LatencyLimits
from slotwise.measure.simulate.pace import CostPace
from slotwise.measure.simulate.simulator import Server, Setup, simulate
from slotwise.measure.simulate.what_if import what_if
from slotwise.measure.workload.sessions import (
    OWN,
    Agents,
    Piece,
    Session,
    Turn,
    agents,
    prefixes,
    read_mooncake,
)
from slotwise.observe.recorder import Recorder

BLOCK = 4
SMALL = Agents(num_sessions=8, rate=0.5, prefix=600, question=(60, 1.0), output=(8, 0.8), result=(28, 1.0),
               turns=6, helper=0.1, helper_prefix=160, helper_turns=2, longest=2400, summary=120)


def setup_of(num_blocks: int, policy: str = LRU, block_size: int = BLOCK) -> Setup:
    limits = SchedulerLimits(
        max_model_len=8192, num_blocks=num_blocks, block_size=block_size, max_num_seqs=8, max_num_batched_tokens=256,
        enable_prefix_caching=True)
    scheduling = Scheduling(Batching(), max_num_seqs=8, max_num_batched_tokens=256, eviction_policy=policy)
    return Setup(scheduling.limits(limits), scheduling, CostPace(cost), max_queued=(1000, 1 << 30))


def cost(work: Work) -> float:
    return 0.002 + 0.0001 * work.tokens + 1e-6 * work.context + 1e-7 * work.pairs


def turn(*contents: int, pause: float = 0.0, output: int = 1) -> Turn:
    """A prompt of one block for each of `contents`, and one token."""
    return Turn(pause, (*(Piece(OWN + one, BLOCK) for one in contents), Piece(3, 1)), Piece(4, output))


def best(turns: list[Turn], num_blocks: int) -> int:
    """The most blocks that any choice finds, by trying all of them."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for one in turns:
        blocks, reached = list(_chain(one, BLOCK)), dict[frozenset[int], int]()
        for kept, found in states.items():
            held = 0
            while held < len(blocks) and blocks[held] in kept:
                held += 1
            all_blocks = sorted(kept | set(blocks))
            for size in range(min(num_blocks, len(all_blocks)) + 1):
                for choice in map(frozenset, combinations(all_blocks, size)):
                    reached[choice] = max(reached.get(choice, 0), found + held)
        states = reached
    return max(states.values())


def test_the_bound_from_hindsight_is_the_best_that_any_choice_finds():
    draw = random.Random(5)
    for _ in range(40):
        turns = [turn(*[draw.randrange(2) for _ in range(draw.randrange(1, 4))]) for _ in range(6)]
        num_blocks = draw.randrange(1, 5)
        assert hindsight(turns, num_blocks, BLOCK)["found"] == BLOCK * best(turns, num_blocks)


@pytest.mark.parametrize("kind", ["agents", "prefixes"])
def test_every_order_ends_all_sessions_and_finds_no_more_than_hindsight(kind):
    sessions = agents(SMALL, seed=3) if kind == "agents" else prefixes(3, 60, rate=8.0, groups=6, prefix=200, scale=0.5)
    setup = setup_of(max(2 * 2600 // 16, working_set(sessions, 16) // 3), block_size=16)
    found = compare(sessions, setup)
    assert found.keys() == {*EVICTION_POLICIES, "hindsight"}
    for policy in EVICTION_POLICIES:
        one = found[policy]
        assert one["prompt_tokens"] == found["hindsight"]["prompt_tokens"]
        assert one["found"] + one["computed"] >= one["prompt_tokens"] and one["session_mean"] > 0
    assert found[LRU]["found"] <= found["hindsight"]["found"]
    assert found["hindsight"]["found"] > 0


def test_what_sessions_that_return_lose_to_a_flood_predictions_keep():
    """Two agents pause ten seconds each time, and single requests fill the cache meanwhile."""
    flood = [Session(0.5 + number, (turn(*range(1000 + 100 * number, 1008 + 100 * number)),)) for number in range(100)]
    agent = [Session(float(start), tuple(
        turn(*range(100 * start, 100 * start + 6 + number), pause=10.0 * (number > 0)) for number in range(8)), "a")
        for start in (1, 2)]
    found = {policy: figures_of(run_sessions([*agent, *flood], setup_of(60, policy))).found
             for policy in (LRU, HINTED, PREDICTED)}
    assert found[LRU] == 0 < found[PREDICTED] <= found[HINTED]


def test_agents_repeat_what_was_said_and_are_the_same_again():
    sessions = agents(SMALL, seed=3)
    assert sessions == agents(SMALL, seed=3) != agents(SMALL, seed=4)
    follows = [after.prompt[: len(before.prompt)] == before.prompt and before.output in after.prompt
               for session in sessions for before, after in zip(session.turns, session.turns[1:], strict=False)]
    assert sum(follows) / len(follows) > 0.6
    assert all(sum(one.num_tokens for one in each.prompt) < SMALL.longest + 5000
               for session in sessions for each in session.turns)


def test_mooncakes_trace_is_read_by_its_hashes(tmp_path: Path):
    rows = [{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
            {"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]},
            {"timestamp": 9000, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]}]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_mooncake(path, 9.0, scale=1 / 8)
    assert [piece.num_tokens for piece in first.turns[0].prompt] == [64, 64, 1] and second.starts_at == 0.5
    assert first.turns[0].prompt[0] == second.turns[0].prompt[0] != second.turns[0].prompt[1]
    path.write_text(json.dumps(rows[0] | {"hash_ids": [0]}))
    with pytest.raises(ValueError, match="line 1: not a request of a Mooncake trace"):
        read_mooncake(path, 9.0)


class Kept:
    """A reader of the entries of a ring."""

    def __init__(self) -> None:
        self.entries: list = []

    def write(self, entry, changes) -> None:
        self.entries.append(entry)


def test_a_what_if_of_a_servers_ring_says_what_retention_would_save():
    """The ring has no prompts, and its replay finds what was found."""
    session = [turn(*range(128), pause=0.0), *(turn(*range(128), pause=20.0) for _ in range(5))]
    flood = [turn(*range(1000 * n, 1000 * n + 128)) for n in range(1, 60)]
    kept, recorder = Kept(), Recorder()
    recorder.add_reader(kept)
    setup = setup_of(700)
    arrivals = sorted(chain(
        ((1 + 20.0 * number, "agent", one) for number, one in enumerate(session)),
        ((2.0 * number, "", one) for number, one in enumerate(flood))), key=lambda each: each[0])
    commands = [(at, command_of(one, number, name)) for number, (at, name, one) in enumerate(arrivals)]
    simulate(commands, [Server(setup, observers=[recorder])])
    assert all(not entry.spec.prompt for entry in kept.entries if hasattr(entry, "spec"))
    answer = what_if(kept.entries, {"eviction_policy": HINTED}, LatencyLimits(), retain={"agent": 60.0})
    prompts = answer["prompts"]
    assert prompts["measured"]["found"] == prompts["replayed"]["found"] == 0
    assert prompts["what_if"]["found"] == 5 * 512
    assert prompts["what_if"]["seconds"] < 0.95 * prompts["replayed"]["seconds"]
    assert "s of prompt computation saved: 2,560 of" in answer["prompts_text"]
    with pytest.raises(ValueError, match="the eviction policy lru obeys no retention"):
        what_if(kept.entries, {"eviction_policy": LRU}, LatencyLimits(), retain={"*": 60.0})


def test_a_cache_of_more_blocks_than_there_can_be_slots_may_be_asked_about():
    assert setup_of(SLOTS + 1).changed({"eviction_policy": HINTED}).limits.eviction_policy == HINTED


def test_a_replay_of_a_servers_ring_finds_the_outputs_that_prompts_repeat():
    kept, recorder = Kept(), Recorder()
    recorder.add_reader(kept)
    asked = []
    for session in agents(replace(SMALL, output=(40, 0.3)), seed=3):
        at = session.starts_at
        for one in session.turns:
            at += one.pause
            asked.append((at, one))
            at += 5.0
    asked.sort(key=lambda each: each[0])
    setup = setup_of(600, block_size=16)
    outputs = {number: one.output_ids for number, (_, one) in enumerate(asked)}
    simulate([(at, command_of(one, number, "")) for number, (at, one) in enumerate(asked)],
             [Server(setup, outputs, observers=[recorder])])
    prompts = what_if(kept.entries, {"eviction_policy": HINTED}, LatencyLimits())["prompts"]
    assert prompts["measured"]["found"] > 0.5 * prompts["measured"]["tokens"]
    assert prompts["replayed"]["found"] == pytest.approx(prompts["measured"]["found"], rel=0.004)


def test_a_what_if_refuses_no_request_where_the_server_refused_none():
    kept, recorder = Kept(), Recorder()
    recorder.add_reader(kept)
    flood = [turn(*range(1000 * n, 1000 * n + 128), output=8) for n in range(400)]
    simulate([(1 + 0.01 * number, command_of(one, number, "")) for number, one in enumerate(flood)],
             [Server(setup_of(700), observers=[recorder])])
    figures = what_if(kept.entries, {"eviction_policy": HINTED}, LatencyLimits())["groups"]["all requests"]
    assert {figures[run]["served"] for run in ("measured", "replayed", "what_if")} == {len(flood)}


def command_of(one: Turn, number: int, name: str) -> Add:
    params = SamplingSpec(max_tokens=one.output.num_tokens, ignore_eos=True)
    return Add(number, RequestSpec(tuple(one.prompt_ids), params, session=name), name=str(number))
