"""The fleet and its routers, by what was sent, told and lost: pure, so that thousands of histories take seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.core.routing.fleet import LONGEST_RETRY, MAX_WAIT, Fleet, ReplicaLoad, Shed, replicas_for
from slotwise.core.routing.prompt import MAX_PIECES, PIECE, RoutedRequest, digests, read, written
from slotwise.core.routing.replica import Replica, Report, prefill_rate
from slotwise.core.routing.routers import ROUTERS, STAY, PrefixAware, product
from slotwise.core.step_time import Work

IDLE = Report(slots=8, step_tokens=256)
BUSY = Report(slots=8, step_tokens=256, num_running=7, num_waiting=1)


def fleet(router: str = "product", size: int = 3, report: Report = IDLE, **options: float) -> Fleet:
    found = Fleet(ROUTERS[router](0), **options)
    for index in range(size):
        found.add(str(index))
        found.update(str(index), report, 0.0)
    return found


def request(name: str, tokens: float = 100.0, pieces: tuple[int, ...] = (), **more: str) -> RoutedRequest:
    return RoutedRequest(name, tokens, pieces, 10.0, **more)


def send(replicas: Fleet, asked: RoutedRequest, without: Sequence[str] = ()) -> Replica | Shed:
    return replicas.route(asked, 0.0, without)


def placed(found: Replica | Shed) -> str:
    assert isinstance(found, Replica)
    return found.name


# -- prompts -----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=2000), st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=4))
def test_prompts_share_digests_as_far_as_they_are_the_same(one: bytes, other: bytes, cuts: list[int]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    left, right = digests("", [one]), digests("", [other])
    shared = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert shared == same // PIECE
    assert len(left) == len(one) // PIECE
    places = sorted(min(cut, len(one)) for cut in cuts)
    parts = [one[a:b] for a, b in zip([0, *places], [*places, len(one)], strict=True)]
    assert digests("", parts) == left
    assert not set(digests("another tenant", [one])) & set(left)


def test_the_digests_of_a_prompt_are_bounded() -> None:
    assert len(digests("", [bytes(PIECE * (MAX_PIECES + 3))])) == MAX_PIECES


@given(st.binary(max_size=5000))
def test_a_header_says_what_was_written(prompt: bytes) -> None:
    pieces = digests("", [prompt])
    assert read(written(len(prompt), pieces)) == (len(prompt), pieces)


@pytest.mark.parametrize("value", ["", ":", "12", "x:", "-1:", "1:00", "256:00000000000g", "255:000000000001",
                                   "9" * 17 + ":", f"{PIECE * 2000}:" + "0" * 12 * (MAX_PIECES + 1), "٣:",
                                   "256:+00000000001"])
def test_another_header_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="must"):
        read(value)


# -- scores ------------------------------------------------------------------------------------------------------------


def test_the_score_is_new_prefill_tokens_times_the_batch() -> None:
    replicas = fleet(size=1)
    (replica,) = replicas.replicas
    replicas.update_cache("0", [1, 2, 3])
    asked = request("a", 100.0, (1, 2, 3, 4))
    assert product(asked, replica) == 70.0 * 1
    send(replicas, asked)
    assert replica.queued_tokens == 70.0
    assert product(request("b", 100.0, (1, 2, 3, 4)), replica) == (70.0 + 60.0) * 2  # the fourth is on its way
    replicas.first_output("a", 1.0)
    assert product(request("b", 100.0, (1, 2, 3, 4)), replica) == 60.0 * 2
    replicas.finished("a")
    assert product(request("b", 100.0, (1, 2, 3, 4)), replica) == 60.0


def test_a_cached_prefix_is_worth_a_longer_batch_but_not_any_batch() -> None:
    replicas = fleet(size=2)
    replicas.update_cache("0", range(10))
    warm = tuple(range(10))
    names = [placed(send(replicas, request(str(index), 110.0, warm))) for index in range(30)]
    for index in range(30):
        replicas.first_output(str(index), 1.0)
    assert names[:3] == ["0"] * 3 and "1" in names


def test_what_a_replica_evicts_it_does_not_have() -> None:
    replicas = fleet(size=1)
    (replica,) = replicas.replicas
    replicas.update_cache("0", [1, 2, 3])
    replicas.update_cache("0", [4], [2, 3])
    assert replica.hit(request("a", pieces=(1, 2, 3))) == 1
    replicas.update_cache("0", [7], is_whole=True)
    assert replica.hit(request("a", pieces=(1, 2, 3))) == 0


def test_pieces_that_were_computed_count_until_a_later_report_tells_of_them() -> None:
    replicas = fleet(size=1)
    (replica,) = replicas.replicas
    send(replicas, request("a", pieces=(1, 2)))
    replicas.update("0", BUSY, 1.0)
    assert replica.hit(request("b", pieces=(1, 2))) == 2  # it waits, and will be computed
    replicas.first_output("a", 2.0)
    replicas.update("0", IDLE, 1.5)  # asked for before
    assert replica.hit(request("b", pieces=(1, 2))) == 2
    replicas.update("0", IDLE, 2.5)  # its index has what is still there
    assert replica.hit(request("b", pieces=(1, 2))) == 0


def test_a_replica_where_none_waits_has_started_all_that_it_was_sent() -> None:
    replicas = fleet(size=1)
    (replica,) = replicas.replicas
    replicas.route(request("a"), 1.0)
    replicas.route(request("b"), 3.0)
    replicas.update("0", BUSY, 2.0)
    assert replica.queued_tokens == 200.0
    replicas.update("0", IDLE, 2.0)
    assert replica.queued_tokens == 100.0 and replica.num_sent == 2


def test_requests_of_others_count_and_ones_own_count_once() -> None:
    replicas = fleet(size=1)
    (replica,) = replicas.replicas
    for index in range(5):
        replicas.route(request(str(index)), 1.0)
    replicas.update("0", Report(8, 256, num_running=7), 2.0)
    assert replica.batch == 7  # two of another door
    for index in range(4):
        replicas.finished(str(index))
    assert replica.batch == 3
    replicas.update("0", Report(8, 256, num_running=5), 3.0)  # from before they ended
    assert replica.batch == 1


def test_equal_scores_go_where_least_is_cached() -> None:
    replicas = fleet(size=3)
    names = []
    for index in range(3):
        names.append(placed(send(replicas, request(str(index), pieces=(index,)))))
        replicas.first_output(str(index), float(index))
        replicas.finished(str(index))
    assert sorted(names) == ["0", "1", "2"]


def test_replicas_of_different_speeds_are_compared_in_seconds() -> None:
    replicas = fleet(size=2)
    replicas.update("0", Report(8, 256, prefill_rate=100.0), 1.0)
    replicas.update("1", Report(8, 256, prefill_rate=1000.0), 1.0)
    names = [placed(send(replicas, request(str(index)))) for index in range(4)]
    assert names.count("1") >= 3


def test_the_rate_of_prefill_is_that_of_a_full_step_beside_the_running_rows() -> None:
    def seconds(work: Work) -> float:
        return 0.001 * work.tokens

    assert prefill_rate(seconds, 256, 0) == pytest.approx(1000.0)
    assert prefill_rate(seconds, 256, 128) == pytest.approx(500.0)
    assert prefill_rate(lambda work: 0.0, 256, 0) == 0.0


def test_a_session_stays_where_it_is_warm_while_that_is_not_much_worse() -> None:
    replicas = fleet(size=2)
    home = placed(send(replicas, request("a", session="s")))
    replicas.first_output("a", 1.0)
    assert placed(send(replicas, request("b", session="s"))) == home  # twice the batch, within STAY
    replicas.first_output("b", 1.0)
    assert STAY < 3 and placed(send(replicas, request("c", session="s"))) != home


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_an_adapter_goes_where_it_is_loaded_and_nowhere_else() -> None:
    replicas = fleet(size=3)
    replicas.update("2", Report(8, 256, adapters=("poet",)), 1.0)
    assert replicas.adapters == {"poet"}
    assert [placed(send(replicas, request(str(number), adapter="poet"))) for number in range(6)] == ["2"] * 6
    assert send(replicas, request("a", adapter="poet"), without=["2"]) == Shed(0.0, 1)
    assert send(replicas, request("b", adapter="other")) == Shed(0.0, 1)
    replicas.lost("2")
    assert send(replicas, request("c", adapter="poet")) == Shed(0.0, 1) and not replicas.adapters


def test_a_report_from_before_a_change_does_not_undo_it() -> None:
    replicas = fleet(size=1)
    replicas.set_adapters("0", ["poet"], 2.0)
    replicas.update("0", IDLE, 1.5)
    assert replicas.adapters == {"poet"}
    replicas.update("0", IDLE, 2.5)
    assert not replicas.adapters


def test_requests_of_an_adapter_go_where_its_place_in_a_step_is() -> None:
    """With one adapter in a step, one beside it would wait until the other's requests have ended."""
    names = ("poet", "clerk")
    replicas = fleet(size=2, report=Report(8, 256, adapters=names, max_loras=1))
    places = {name: placed(send(replicas, request(name, adapter=name))) for name in names}
    assert set(places.values()) == {"0", "1"}
    for number in range(10):
        name = names[number % 2]
        assert placed(send(replicas, request(str(number), adapter=name))) == places[name]
    for number in range(0, 10, 2):
        replicas.finished(str(number))
    replicas.finished("poet")  # its place is free: both may have the clerk's
    assert {placed(send(replicas, request(f"more {number}", adapter="clerk"))) for number in range(16)} == {"0", "1"}


def test_an_adapter_without_a_place_anywhere_goes_where_it_is_best() -> None:
    replicas = fleet(size=1, report=Report(8, 256, adapters=("poet", "clerk"), max_loras=1))
    assert [placed(send(replicas, request(name, adapter=name))) for name in ("poet", "clerk")] == ["0", "0"]


# -- shedding ----------------------------------------------------------------------------------------------------------


def test_a_request_is_shed_with_the_time_after_which_it_would_be_taken() -> None:
    replicas = fleet(size=2, report=Report(4, 256, prefill_rate=1000.0), max_wait=10.0)
    sent = 0
    while isinstance(found := send(replicas, request(str(sent), 1000.0)), Replica):
        sent += 1
    assert sent == 20  # a second each, on two replicas
    assert found.wait == pytest.approx(11.0) and found.retry_after == 1
    assert isinstance(later := send(replicas, request("long", 30_000.0)), Shed)
    assert later.retry_after == 30
    for index in range(4):  # both are a second or two further
        replicas.first_output(str(index), 1.0)
    assert isinstance(send(replicas, request("again", 1000.0)), Replica)


def test_the_wait_for_a_slot_counts() -> None:
    replicas = fleet(size=1, report=Report(2, 256, 2, 38, starts_per_second=0.5), max_wait=60.0)
    found = send(replicas, request("a"))
    assert isinstance(found, Shed) and found.wait == pytest.approx(39 / 0.5) and found.retry_after == 18


@given(st.floats(0.2, 20.0), st.integers(0, 3000))
def test_a_retry_at_the_time_that_was_told_is_taken_and_an_earlier_one_is_not(rate: float, waiting: int) -> None:
    """If no other request comes and requests go on starting at their rate; to within the start of one."""

    def after(seconds: float) -> Replica | Shed:
        left = max(0, waiting - int(max(0.0, seconds) * rate))
        return send(fleet(size=2, report=Report(4, 256, 4, left, starts_per_second=rate)), request("a"))

    found = after(0.0)
    if isinstance(found, Shed):
        is_bounded = found.wait - MAX_WAIT > LONGEST_RETRY
        assert is_bounded or isinstance(after(found.retry_after + 1 / rate), Replica)
        assert isinstance(after(found.retry_after - 1 - 2 / rate), Shed)
    else:
        assert (waiting + 1) / rate <= MAX_WAIT


def test_an_endless_wait_has_a_bounded_retry() -> None:
    replicas = fleet(size=1, report=Report(2, 256, 2, 9999, starts_per_second=0.01))
    found = send(replicas, request("a"))
    assert isinstance(found, Shed) and found.retry_after == LONGEST_RETRY


def test_without_a_replica_everything_is_shed() -> None:
    replicas = fleet(size=1)
    replicas.drain("0")
    assert send(replicas, request("a")) == Shed(0.0, 1)


def test_a_replica_that_has_told_nothing_is_not_chosen() -> None:
    replicas = Fleet(ROUTERS["product"](0))
    replicas.add("0")
    assert isinstance(send(replicas, request("a")), Shed)
    with pytest.raises(ValueError, match="there is a replica 0"):
        replicas.add("0")


# -- baselines ---------------------------------------------------------------------------------------------------------


def test_round_robin_goes_round() -> None:
    replicas = fleet("round-robin", 3)
    assert [placed(send(replicas, request(str(index)))) for index in range(6)] == ["0", "1", "2"] * 2


def test_power_of_two_takes_the_shorter_queue() -> None:
    replicas = fleet("power-of-two", 2)
    names = [placed(send(replicas, request(str(index)))) for index in range(40)]
    assert names.count("0") == 20


def test_prefix_aware_follows_what_it_sent() -> None:
    replicas = fleet("prefix-aware", 3)
    first = placed(send(replicas, request("a", 40.0, (1, 2, 3, 4))))
    other = placed(send(replicas, request("b", 40.0, (5, 6, 7, 8))))
    assert other != first  # nothing matches: where least was sent
    assert placed(send(replicas, request("c", 40.0, (1, 2, 9, 10)))) == first


def test_prefix_aware_balances_beyond_its_bound() -> None:
    found = Fleet(PrefixAware(0, imbalance=3))
    for name in ("0", "1"):
        found.add(name)
        found.update(name, IDLE, 0.0)
    names = [placed(send(found, request(str(index), 40.0, (1, 2, 3, 4)))) for index in range(12)]
    assert {"0", "1"} == set(names)


# -- any history -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ROUTERS)), st.integers(0, 2**32))
def test_any_history_keeps_each_request_in_one_place_and_repeats_itself(router: str, seed: int) -> None:
    assert _history(router, seed) == _history(router, seed)


def _history(router: str, seed: int) -> list[str]:
    """Requests, ends, deaths, reports and drains at random; returns where requests went."""
    rng, replicas, unfinished, places = random.Random(seed), fleet(router, 4), set(), []
    for number in range(200):
        name = str(rng.randrange(4))
        if rng.random() < 0.5:
            asked = request(f"r{number}", rng.uniform(1, 500), tuple(range(rng.randrange(20))), session=name)
            without = [name] if rng.random() < 0.2 else []
            found = send(replicas, asked, without)
            if isinstance(found, Replica):
                assert found.is_up and not found.is_draining and found.name not in without
                unfinished.add(asked.request_id)
                places.append(found.name)
                with pytest.raises(ValueError, match="is on a replica"):
                    send(replicas, asked)
            else:
                assert not replicas.usable(without) and 1 <= found.retry_after <= LONGEST_RETRY
        elif unfinished and rng.random() < 0.6:
            one = sorted(unfinished)[rng.randrange(len(unfinished))]
            if rng.random() < 0.5:
                replicas.first_output(one, float(number))
            else:
                replicas.finished(one)
                unfinished.discard(one)
        elif rng.random() < 0.3:
            gone = replicas.lost(name)
            assert set(gone) <= unfinished
            unfinished -= set(gone)
        else:
            replicas.update(name, IDLE, float(number))
            replicas.update_cache(name, [rng.randrange(20)], [rng.randrange(20)])
        replicas.check()
    for one in sorted(unfinished):
        replicas.finished(one)
    assert all(replica.num_sent == 0 and replica.queued_tokens == 0 for replica in replicas.replicas)
    return places


# -- autoscaling -------------------------------------------------------------------------------------------------------


def test_replicas_are_added_by_predicted_wait_and_by_occupied_slots() -> None:
    assert replicas_for([ReplicaLoad(0.0, 0.5)] * 2, 2.0) == 2
    assert replicas_for([ReplicaLoad(6.0, 0.5)] * 2, 2.0) == 6
    assert replicas_for([ReplicaLoad(0.0, 1.6)] * 2, 2.0) == 4
    assert replicas_for([ReplicaLoad(0.0, 0.0)] * 3, 2.0) == 1


@given(st.lists(st.builds(ReplicaLoad, st.floats(0, 100), st.floats(0, 3)), min_size=1, max_size=20),
       st.floats(0.1, 10))
def test_a_replica_is_removed_only_where_the_others_do_not_call_for_it_again(
        loads: list[ReplicaLoad], target: float) -> None:
    number = replicas_for(loads, target)
    assert number >= 1
    if number < len(loads):
        share = len(loads) / number
        spread = [ReplicaLoad(sum(one.wait for one in loads) / len(loads) * share,
                       sum(one.busy for one in loads) / len(loads) * share)] * number
        assert replicas_for(spread, target) <= number
