"""Servers on a virtual clock: replicas, refusals, machines of the file, figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from slotwise.core.record import StepRecord
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Observer
from slotwise.measure.simulate.figures import REFUSED, Distribution, LatencyLimits, SimulatedRequest, figures
from slotwise.measure.simulate.machines import ModelShape, described, names, setup_of
from slotwise.measure.simulate.pace import CostPace, LearnedPace, Spread
from slotwise.measure.simulate.simulator import AdapterLoad, InstantKVLink, Server, simulate, simulate_apart, traffic_of
from slotwise.measure.workload.distributions import AtOnce, Closed, Fixed, LogNormal, Poisson, Uniform
from slotwise.measure.workload.workloads import Recipe, Workload, generate

SMALL = ModelShape(  # 135 million weights, 30 layers
    weight_bytes=270_000_000, position_bytes=23_040, token_weights=106_000_000, head_weights=28_000_000,
    pair_operations=69_120, max_model_len=2048)


def workload(rate: float, number: int = 60, users: int = 0) -> Workload:
    coming = Closed(users) if users else Poisson(rate)
    return generate(Recipe(number, Uniform(50, 400), Uniform(5, 40), coming), 5)


def served(setup, rate: float, replicas: int = 1) -> dict[str, SimulatedRequest]:
    return simulate(traffic_of(workload(rate)), [Server(setup, replica=number) for number in range(replicas)])


@pytest.mark.parametrize("name", names())
def test_each_machine_of_the_file_names_its_source_and_serves_all_requests(name: str):
    requests = served(setup_of(name, SMALL, EngineConfig.of(model="")), 5.0)
    expected = {one.number: one.num_output for one in workload(5.0).requests}
    assert {key: len(one.token_times) for key, one in requests.items()} == expected
    assert "(" in described(name)


def test_a_machine_of_more_bandwidth_is_faster():
    slow, fast = (figures(list(served(setup_of(name, SMALL, EngineConfig.of(model="")), 5.0).values()))
                  for name in ("xeon", "h200"))
    assert fast.itl_p50 < slow.itl_p50 and fast.ttft_p50 < slow.ttft_p50


def test_first_tokens_of_a_burst_come_almost_as_soon_as_without_streams_and_gaps_stay_within_four_limits():
    def cost(work: Work) -> float:
        return 0.009 + 0.00085 * work.rows + 0.00057 * (work.tokens - work.rows) if work.rows else 0.0

    config = EngineConfig.of(model="", max_num_batched_tokens=576, max_stall_ms=70)
    setup = replace(setup_of("epyc", SMALL, config), pace=CostPace(cost))
    burst = generate(Recipe(64, LogNormal(128, 0.9, 1024), LogNormal(64, 0.9, 512), AtOnce()), 92)
    prompts = replace(burst, requests=tuple(replace(one, num_output=1) for one in burst.requests))
    alone, found = (list(simulate(traffic_of(each), [Server(setup)]).values()) for each in (prompts, burst))
    first, without = ([one.ttft for one in each] for each in (found, alone))
    assert first == sorted(first), "no request passes another"
    assert median(first) < 1.1 * median(without)
    assert max(later - earlier for one in found for earlier, later in pairwise(one.token_times)) <= 0.280


def test_the_same_seed_gives_the_same_times_to_the_bit():
    setup = setup_of("epyc", SMALL, EngineConfig.of(model=""))
    assert served(setup, 20.0, replicas=3) == served(setup, 20.0, replicas=3)


def test_requests_go_to_the_replica_with_the_fewest_unfinished():
    setup = setup_of("epyc", SMALL, EngineConfig.of(model="", max_num_seqs=4))
    one, two = served(setup, 50.0), served(setup, 50.0, replicas=2)
    assert {request.replica for request in two.values()} == {0, 1}
    assert figures(list(two.values())).ttft_p99 < figures(list(one.values())).ttft_p99


def test_admission_control_refuses_as_the_servers_does():
    setup = replace(setup_of("epyc", SMALL, EngineConfig.of(model="", max_num_seqs=1)), max_queued=(3, None))
    requests = list(served(setup, 1000.0).values())
    refused = [one for one in requests if one.reason == REFUSED]
    assert refused and not any(one.token_times for one in refused)
    assert figures(requests).refused == len(refused) and figures(requests).served == len(requests) - len(refused)


def test_what_cannot_be_simulated_is_refused_by_name():
    with pytest.raises(ValueError, match="closed loop"):
        next(iter(traffic_of(workload(1.0, users=2))))
    with pytest.raises(ValueError, match="there is no machine"):
        setup_of("abacus", SMALL, EngineConfig.of(model=""))
    with pytest.raises(ValueError, match="exceed 90%"):
        setup_of("h100", replace(SMALL, weight_bytes=10**11), EngineConfig.of(model=""))


def test_figures_are_of_tokens_within_the_objectives():
    good = SimulatedRequest.measured(0.0, [1.0, 1.5, 2.0], 2.0, "length")
    late = SimulatedRequest.measured(1.0, [4.0, 4.5], 4.5, "stop")
    found = figures([good, late], LatencyLimits(ttft=2.0, tpot=0.6))
    assert (found.ttft_p50, found.ttft_p99, found.itl_p50) == (1.0, 3.0, 0.5)
    assert found.output_throughput == pytest.approx(5 / 4.5) and found.goodput == pytest.approx(1 / 4.5)
    assert Distribution().quantiles(0.5) == [0.0]


def test_a_learned_pace_takes_every_graph_as_captured():
    times = StepTimeModel()
    for _ in range(40):  # each with a context not seen before costs the capture of its graph
        for rows in (1, 2, 4, 8):
            times.learn(Work(rows, rows, 100 * rows, 0.0, 100), 0.010)
    pace = LearnedPace(times)
    assert pace.step(Work(4, 4, 400, 0.0, 100_000)) == pace.step(Work(4, 4, 400, 0.0))
    assert pace.step(Work(4, 4, 400, 0.0)) == pytest.approx(0.010, rel=0.1)


def test_steps_vary_as_those_of_the_log_did_and_the_same_work_takes_the_same_time():
    times = StepTimeModel()
    for rows in (1, 2, 4, 8) * 20:
        times.learn(Work(rows, rows, 100 * rows, 0.0), 0.010)
    pace = LearnedPace(times, decoding=Spread.of([(0.0, 1.0, 0.9), (1.0, 1.0, 1.0), (2.0, 1.0, 2.0)]))
    works = [Work(4, 4, 400 + 4 * index, 0.0) for index in range(3000)]
    ratios = [pace.step(work) / pace.predicted(work) for work in works]
    assert sum(ratios) / len(ratios) == pytest.approx(1.3, rel=0.02)
    assert {round(ratio, 6) for ratio in ratios} == {0.9, 1.0, 2.0}
    assert all(pace.least(works[0]) <= pace.step(work) == pace.step(work) for work in works)
    other = replace(pace, seed=1)
    assert sum(other.step(work) != pace.step(work) for work in works) > 1000
    prompt = Work(64, 1, 0, 2080.0)
    assert pace.step(prompt) == pace.predicted(prompt) == pace.least(prompt)


def test_small_steps_vary_as_small_ones_did_and_large_ones_as_large_ones():
    small = [(float(index), 0.001 + index * 1e-6, 0.002) for index in range(96)]
    large = [(float(index), 0.1, 0.11 if index < 60 else 0.1) for index in range(120)]
    spread = Spread.of(large + small)
    assert all(1.8 < spread.drawn(0.00105, number) <= 2.0 for number in range(500))
    assert {round(spread.drawn(0.1, number), 6) for number in range(500)} == {1.0, 1.1}
    assert spread.drawn(9.0, 7) == pytest.approx(1.1) and spread.least == pytest.approx(1.0)
    assert Spread.of([(0.0, 0.0, 1.0)]) == Spread() and Spread().drawn(0.5, 3) == 1.0
    times = StepTimeModel()
    times.typical = lambda work: 0.1
    prompt = Work(64, 1, 0, 2080.0)
    pace = LearnedPace(times, prompts=spread)
    assert {round(pace.step(prompt, at), 6) for at in range(50)} == {0.1, 0.11}, "not all first chunks are slow ones"
    pace = replace(pace, replays=True)
    assert [round(pace.step(prompt, at), 6) for at in (-9.0, 0.0, 59.4, 59.6, 1e6)] == [0.11, 0.11, 0.11, 0.1, 0.1]


def one_prompt(setup, num_prompt: int, num_output: int) -> SimulatedRequest:
    recipe = Recipe(1, Fixed(num_prompt), Fixed(num_output), AtOnce())
    return next(iter(simulate(traffic_of(generate(recipe, 1)), [Server(setup)]).values()))


def ranks(width: int = 1, stages: int = 1, link: float = 0.0):
    config = EngineConfig.of(model="", max_num_seqs=4, max_num_batched_tokens=100, max_stall_ms=0,
                             tensor_parallel_size=width, pipeline_parallel_size=stages)
    return setup_of("epyc", replace(SMALL, num_layers=30), config, link)


def test_stages_compute_chunks_of_a_prompt_at_once_and_tokens_one_after_the_other():
    one, two = (one_prompt(ranks(stages=stages), 2000, 20) for stages in (1, 2))
    assert one.ttft is not None and two.ttft == pytest.approx(one.ttft * 21 / 40, rel=0.02)  # of 20 chunks
    assert two.tpot == pytest.approx(one.tpot, rel=0.01)


def test_stages_serve_all_requests_of_a_busy_server():
    found = served(ranks(stages=2), 40.0)
    assert all(one.reason in ("stop", "length") for one in found.values())


def test_ranks_of_a_layer_are_faster_by_less_than_their_number_for_they_wait_for_each_other():
    alone, fast, slow = (one_prompt(ranks(*given), 400, 20).tpot for given in ((1,), (2, 1, 1e-6), (2, 1, 1e-4)))
    assert alone / 2 < fast < alone < slow


def test_a_model_too_large_for_one_machine_fits_two():
    large = replace(SMALL, weight_bytes=100 * 10**9)
    with pytest.raises(ValueError, match="exceed 90%"):
        setup_of("h100", large, EngineConfig.of(model=""))
    for given in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        assert setup_of("h100", large, EngineConfig.of(model="", **given)).limits.num_blocks > 0


def test_adapters_wait_for_each_other_and_each_of_a_step_takes_its_time():
    def seconds(max_loras: int, adapter: float) -> float:
        setup = setup_of("epyc", SMALL, EngineConfig.of(model="", max_num_seqs=4))
        setup = replace(setup, limits=replace(setup.limits, max_loras=max_loras), adapters=AdapterLoad(4, adapter))
        found = simulate(traffic_of(workload(1000.0), setup.adapters.number), [Server(setup)])
        return max(one.ended for one in found.values())

    assert seconds(4, 0.0) < seconds(1, 0.0)
    assert seconds(4, 0.0) < seconds(4, 0.005)


class Longest(Observer):
    """The most tokens of a row."""

    tokens = 0

    def stepped(self, record: StepRecord) -> None:
        self.tokens = max(self.tokens, *record.plan.counts, 0)


def with_roles(setup, num_prefill: int, num_decode: int, rate: float, seconds_per_token: float = 0.0):
    prefill = [Server(setup, replica=number) for number in range(num_prefill)]
    seen = [Longest() for _ in range(num_decode)]
    decode = [Server(setup, observers=[one], replica=number, kv_link=InstantKVLink(setup.limits.block_size))
              for number, one in enumerate(seen)]
    found = simulate_apart(traffic_of(workload(rate)), prefill, decode, seconds_per_token)
    for server in (*prefill, *decode):
        server.engine._scheduler.check()
    return found, max(one.tokens for one in seen)


def test_apart_every_request_is_served_and_no_decode_step_computes_a_prompt():
    setup = setup_of("epyc", SMALL, EngineConfig.of(model="", max_num_seqs=8))
    found, longest = with_roles(setup, 1, 2, 40.0)
    assert {name: one.num_tokens for name, one in found.items()} == {
        one.number: one.num_output for one in workload(40.0).requests}
    assert {one.replica for one in found.values()} == {0, 1}
    assert longest == 1, "each prompt has arrived but for its last token"
    alike, apart = (figures(list(one.values())) for one in (served(setup, 40.0, replicas=3), found))
    assert apart.itl_p99 < alike.itl_p99


def test_apart_a_first_token_waits_for_its_prompt_to_travel():
    setup = setup_of("epyc", SMALL, EngineConfig.of(model="", max_num_seqs=8))
    near, far = (with_roles(setup, 2, 1, 5.0, seconds)[0] for seconds in (0.0, 0.001))
    for one in workload(5.0).requests:
        assert far[one.number].ttft > near[one.number].ttft + 0.0005 * one.num_prompt
