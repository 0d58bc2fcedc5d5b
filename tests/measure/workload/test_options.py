"""Workloads asked for on the command line, and the contradictions that are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from slotwise.cli.workload_options import Defaults, add_seed_option, add_workload_options, workload_of
from slotwise.measure.workload.chats import generate_chats
from slotwise.measure.workload.workloads import Workload

TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,80,8\n4,40,16\n"


def asked(*words: str) -> Workload:
    parser = argparse.ArgumentParser()
    add_workload_options(parser, Defaults(num_chats=64))
    add_seed_option(parser)
    return workload_of(parser.parse_args(words))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def test_nothing_asked_gives_the_defaults() -> None:
    workload = asked()
    assert len(workload.requests) == 64
    assert workload.description["output_lengths"] == "lognormal:64:1.0:512"
    assert workload.max_tokens == 512


def test_everything_asked_is_what_comes() -> None:
    workload = asked("--num-prompts", "5", "--input-lengths", "fixed:20", "--output-lengths", "uniform:2:9",
                     "--arrivals", "closed:3", "--prefix", "2:10", "--max-tokens", "6", "--seed", "4")
    assert (len(workload.requests), workload.users, workload.max_tokens, workload.seed) == (5, 3, 6, 4)
    assert {request.num_prompt for request in workload.requests} == {30}


@pytest.mark.parametrize(("words", "arrivals"), [
    (("--request-rate", "4"), "poisson:4"), (("--request-rate", "inf"), "at-once"),
    (("--request-rate", "4", "--burstiness", "1"), "poisson:4"),
    (("--request-rate", "4", "--burstiness", "0.25"), "gamma:4:2"),
])
def test_rate_and_burstiness_are_arrivals(words: tuple[str, ...], arrivals: str) -> None:
    assert asked(*words).description["arrivals"] == arrivals


def test_a_saved_workload_is_repeated(tmp_path: Path) -> None:
    path = str(tmp_path / "saved.jsonl")
    saved = asked("--num-prompts", "3", "--seed", "9", "--save-workload", path)
    assert asked("--workload", path) == saved


def test_a_trace_is_replayed_and_scaled(trace: str) -> None:
    workload = asked("--trace", trace, "--length-scale", "0.5", "--time-scale", "0.25")
    assert [(r.arrives_at, r.num_prompt, r.num_output) for r in workload.requests] == [(0.0, 40, 4), (1.0, 20, 8)]
    assert len(asked("--trace", trace, "--num-prompts", "1").requests) == 1
    assert asked("--trace", trace, "--request-rate", "inf").requests[-1].arrives_at == 0.0


@pytest.mark.parametrize(("words", "says"), [
    (("--workload", "x", "--num-prompts", "3"), "--num-prompts"), (("--workload", "x", "--trace", "y"), "--trace"),
    (("--trace", "x", "--output-lengths", "fixed:1"), "--output-lengths"),
    (("--length-scale", "2"), "--length-scale"), (("--time-scale", "2"), "--time-scale"),
    (("--trace", "x", "--time-scale", "2", "--request-rate", "1"), "--time-scale"),
    (("--arrivals", "at-once", "--request-rate", "1"), "--request-rate"),
    (("--arrivals", "trace"), "--trace"), (("--burstiness", "2"), "--request-rate"),
    (("--request-rate", "inf", "--burstiness", "2"), "--request-rate"),
    (("--prefix", "3"), "GROUPS:TOKENS"), (("--input-lengths", "long"), "fixed:TOKENS"),
])
def test_what_contradicts_itself_is_refused_in_one_line(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says) as told:
        asked(*words)
    assert "\n" not in str(told.value)


def test_chats_are_conversations_of_the_seed() -> None:
    workload = asked("--dataset-name", "chats", "--num-prompts", "7", "--max-tokens", "9", "--seed", "2")
    assert (len(workload.requests), workload.max_tokens, workload.ends_by_itself) == (7, 9, True)
    assert workload == generate_chats(7, max_tokens=9, seed=2)


@pytest.mark.parametrize("words", [
    ("--input-lengths", "fixed:3"), ("--output-lengths", "fixed:3"), ("--prefix", "2:10"),
    ("--save-workload", "saved.jsonl")])
def test_chats_bring_their_texts_along(words: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"leave out {words[0]}"):
        asked("--dataset-name", "chats", *words)
