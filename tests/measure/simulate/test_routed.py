"""Routers in front of simulated servers: what they know, and what that is worth."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from slotwise.core.routing.routers import ROUTERS
from slotwise.engine.config import EngineConfig
from slotwise.measure.simulate.machines import ModelShape, setup_of
from slotwise.measure.simulate.simulated_routing import RoutedServers, pieces_of
from slotwise.measure.simulate.simulator import Server, SimulatedRequest, simulate, traffic_of
from slotwise.measure.workload.distributions import Poisson, Uniform
from slotwise.measure.workload.workloads import Recipe, Workload, generate

SHAPE = ModelShape(
    weight_bytes=15_000_000_000, position_bytes=131_072, token_weights=6_980_000_000, head_weights=525_000_000,
    pair_operations=524_288, max_model_len=8192)
NUMBER, REPLICAS = 150, 4


def workload() -> Workload:
    """Most of each prompt is that of one of forty groups, which need more than one replica's cache."""
    rng = random.Random(3)
    drawn = generate(Recipe(NUMBER, Uniform(2000, 3000), Uniform(5, 30), Poisson(40.0)), 5)
    return replace(drawn, requests=tuple([
        replace(one, prefix=rng.randrange(40), num_prefix=1900) for one in drawn.requests]))


def served(router: str, max_queued: tuple[int | None, int | None] = (None, None)) -> dict[str, SimulatedRequest]:
    setup = setup_of("h100", SHAPE, EngineConfig.of(model="", max_num_seqs=16))
    limits = replace(setup.limits, num_blocks=40_000 // setup.limits.block_size)
    setup = replace(setup, limits=limits, max_queued=max_queued)
    routed = RoutedServers(ROUTERS[router](0), REPLICAS, setup.pace)
    servers = [Server(setup, observers=[told], replica=index) for index, told in enumerate(routed.observers)]
    found = simulate(traffic_of(workload()), servers, routed=routed)
    routed.tell(inf)
    assert all(one.num_sent == 0 for one in routed.fleet.replicas)
    routed.fleet.check()
    return found


def first_tokens(requests: dict[str, SimulatedRequest]) -> list[float]:
    return sorted(one.ttft for one in requests.values() if one.ttft is not None)


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_every_request_is_served_once_and_the_same_run_repeats(router: str) -> None:
    one, other = served(router), served(router)
    assert len(one) == len(first_tokens(one)) == NUMBER
    assert first_tokens(one) == first_tokens(other)
    assert {request.replica for request in one.values()} == set(range(REPLICAS))


def test_knowing_what_is_cached_brings_first_tokens_earlier() -> None:
    product, robin = first_tokens(served("product")), first_tokens(served("round-robin"))
    assert sum(product) < 0.9 * sum(robin)
    assert product[-4] < robin[-4]


def test_requests_of_an_adapter_meet_where_its_place_in_a_step_is() -> None:
    """With one adapter in a step, another one waits until the requests of the first have ended."""
    means = {}
    for router in ("product", "least-unfinished"):
        setup = setup_of("h100", SHAPE, EngineConfig.of(model="", max_num_seqs=16, enable_lora=True, max_loras=1))
        routed = RoutedServers(ROUTERS[router](0), 2, setup.pace)
        servers = [Server(setup, observers=[told], replica=index) for index, told in enumerate(routed.observers)]
        drawn = generate(Recipe(120, Uniform(100, 200), Uniform(20, 60), Poisson(40.0)), 5)
        found = simulate(traffic_of(drawn, adapters=2), servers, routed=routed)
        means[router] = sum(first_tokens(found)) / len(drawn.requests)
    assert means["product"] < 0.7 * means["least-unfinished"]


def test_a_request_that_its_server_refuses_is_on_no_server() -> None:
    requests = served("product", (1, None))
    assert any(one.reason == "refused" for one in requests.values())


def test_prompts_share_pieces_as_far_as_they_are_the_same() -> None:
    one, other = [1] * 40, [1] * 24 + [2] * 16
    assert pieces_of(one, 8, "")[:3] == pieces_of(other, 8, "")[:3] and len(pieces_of(one, 8, "")) == 5
    assert not set(pieces_of(one, 8, "")[3:]) & set(pieces_of(other, 8, ""))
    assert not set(pieces_of(one, 8, "a")) & set(pieces_of(one, 8, ""))
