"""Workloads: drawn from a seed part by part, with prompts that are the same wherever they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.measure.workload.distributions import (
    Closed,
    Exponential,
    Fixed,
    Poisson,
    Prefixes,
    Uniform,
    parse_prefixes,
)
from slotwise.measure.workload.workloads import Recipe, Workload, WorkRequest, generate

RECIPE = Recipe(3, Uniform(5, 9), Exponential(10, 50), Poisson(4), Prefixes(2, 3))
LARGE = replace(RECIPE, num_requests=200)


def test_a_seed_means_the_same_workload_for_ever() -> None:
    workload = generate(RECIPE, 7)
    found = [(r.num_prompt, r.num_output, r.prefix, r.num_prefix) for r in workload.requests]
    assert found == [(12, 7, 0, 3), (10, 4, 1, 3), (10, 5, 0, 3)]
    assert [r.arrives_at for r in workload.requests] == pytest.approx([0, 0.44709203580021206, 0.46202079639916244])
    assert [workload.prompt_ids(r, 4000) for r in workload.requests] == [
        [366, 17, 86, 3191, 3613, 3288, 1994, 2303, 2358, 504, 923, 2241],
        [1910, 236, 2526, 376, 42, 1269, 386, 1778, 984, 3802],
        [366, 17, 86, 3912, 1668, 1417, 3747, 1159, 1274, 2023]]


def column(workload: Workload, name: str) -> list[Any]:
    return [getattr(request, name) for request in workload.requests]


@pytest.mark.parametrize(("change", "touches"), [
    ({"outputs": Fixed(9)}, {"num_output"}),
    ({"inputs": Fixed(9)}, {"num_prompt"}),
    ({"arrivals": Poisson(1)}, {"arrives_at"}),
    ({"prefixes": Prefixes(9, 3)}, {"prefix"}),
])
def test_to_change_a_part_leaves_the_others_as_they_were(change: dict[str, Any], touches: set[str]) -> None:
    before, after = generate(LARGE, 3), generate(replace(LARGE, **change), 3)
    changed = {name for name in ("num_prompt", "num_output", "arrives_at", "prefix")
               if column(before, name) != column(after, name)}
    assert changed == touches


def test_another_seed_changes_everything() -> None:
    before, after = generate(LARGE, 3), generate(LARGE, 4)
    assert all(column(before, name) != column(after, name)
               for name in ("num_prompt", "num_output", "arrives_at", "prefix"))
    request = before.requests[0]
    assert before.prompt_ids(request, 4000) != after.prompt_ids(request, 4000)


def test_those_of_one_group_begin_alike_and_no_others() -> None:
    workload = generate(replace(LARGE, prefixes=Prefixes(3, 8)), 0)
    beginnings = {}
    for request in workload.requests:
        ids = workload.prompt_ids(request, 4000)
        assert len(ids) == request.num_prompt >= 8 + 5
        assert beginnings.setdefault(request.prefix, ids[:8]) == ids[:8]
    assert len({tuple(ids) for ids in beginnings.values()}) == 3
    rests = {tuple(workload.prompt_ids(request, 4000)[8:]) for request in workload.requests}
    assert len(rests) == len(workload.requests)


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_prompt_ids_exist_and_are_plain(vocab_size: int, seed: int) -> None:
    workload = generate(Recipe(1, Fixed(50), Fixed(1)), seed)
    ids = workload.prompt_ids(workload.requests[0], vocab_size)
    assert len(ids) == 50
    assert all(min(10, vocab_size - 1) <= token < vocab_size for token in ids)
    with pytest.raises(ValueError, match="at least 1 token"):
        workload.prompt_ids(workload.requests[0], 0)


def test_every_request_asks_for_the_same_and_ends_at_its_own() -> None:
    workload = generate(replace(LARGE, max_tokens=12), 0)
    assert workload.max_tokens == max(column(workload, "num_output")) == 12
    uncut = generate(LARGE, 0)
    assert uncut.max_tokens == 50
    assert column(workload, "num_output") == [min(12, length) for length in column(uncut, "num_output")]


def test_totals_are_those_of_the_requests() -> None:
    workload = Workload((WorkRequest(0, 0.0, 3, 1), WorkRequest(1, 0.0, 4, 3)), max_tokens=4)
    assert (workload.prompt_tokens, workload.output_tokens) == (7, 4)


def test_a_closed_loop_has_users_and_no_times() -> None:
    workload = generate(replace(RECIPE, arrivals=Closed(2)), 0)
    assert workload.users == 2
    assert column(workload, "arrives_at") == [None, None, None]


@pytest.mark.parametrize(("arguments", "says"), [
    ((0, -1.0, 1, 1), "arrives_at"), ((0, float("nan"), 1, 1), "arrives_at"), ((0, 0.0, 0, 1), "num_prompt"),
    ((0, 0.0, 1, 0), "num_output"), ((0, 0.0, 5, 1, 0, 0), "prefix"), ((0, 0.0, 5, 1, -1, 3), "prefix"),
    ((0, 0.0, 5, 1, 2, 6), "num_prefix"), ((0, 0.0, 5, 1, -2, 3), "prefix"),
])
def test_a_request_that_cannot_be_is_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WorkRequest(*arguments)


@pytest.mark.parametrize(("requests", "users", "says"), [
    ((), 0, "number of requests"),
    ((WorkRequest(1, 0.0, 1, 1),), 0, "numbered"),
    ((WorkRequest(0, 0.0, 1, 9),), 0, "max_tokens"),
    ((WorkRequest(0, 1.0, 1, 1), WorkRequest(1, 0.5, 1, 1)), 0, "before the one ahead"),
    ((WorkRequest(0, 1.0, 1, 1),), 2, "closed loop"),
    ((WorkRequest(0, None, 1, 1),), 0, "closed loop"),
])
def test_requests_that_do_not_go_together_are_refused(
    requests: tuple[WorkRequest, ...], users: int, says: str,
) -> None:
    with pytest.raises(ValueError, match=says):
        Workload(requests, max_tokens=8, users=users)


def test_prefixes_read_as_they_are_written() -> None:
    assert str(parse_prefixes("4:256")) == "4:256"
    for text in ("4", "4:0", "0:4", "a:b", "1:2:3", "-1:5"):
        with pytest.raises(ValueError, match=r"GROUPS:TOKENS|must be between"):
            parse_prefixes(text)
