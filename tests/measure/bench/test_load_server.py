"""The load generator against a server in another process, whose every token comes at a known time."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from support.fake_server import CUT, ERROR_EVENT, HALVES, NO_USAGE, SILENT_ENDING, Behavior, fake_server

from slotwise.measure.bench.load_generator import (
    CHAT,
    COMPLETIONS,
    BenchError,
    BenchTarget,
    LoadResult,
    Phrasing,
    measure,
    offered_rate,
    resolve,
    serving_result,
)
from slotwise.measure.bench.measures import GoodputLimits, RequestOutcome
from slotwise.measure.workload.distributions import AtOnce, Closed, Fixed, Poisson, Prefixes, Uniform
from slotwise.measure.workload.workloads import Recipe, Workload, WorkRequest, generate

TTFT, ITL = 1.0, 0.1  # seconds; long beside what a busy machine adds
EVENTS = 8
ATTEMPTS = 8  # a machine that others keep busy may spoil some; what is wrong by itself fails them all


def spaced(count: int, seconds: float, num_output: int) -> Workload:
    return Workload(
        tuple(WorkRequest(number, number * seconds, 20, num_output) for number in range(count)), num_output)


def seen(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/seen", timeout=120) as response:
        return json.load(response)


def run(url: str, workload: Workload, phrasing: Phrasing | None = None, endpoint: str = COMPLETIONS) -> LoadResult:
    return measure(BenchTarget(url, endpoint, "fake"), workload, phrasing or Phrasing(), num_warmups=0)


def by_number(measured: LoadResult) -> list[RequestOutcome]:
    return sorted(measured.outcomes, key=lambda outcome: outcome.number)


def beyond_two_percent(result: dict[str, Any], known: dict[str, float]) -> dict[str, float]:
    """Figures of a result that are not what is known, by name; seconds."""
    found = {name: result[f"median_{name}_ms"] / 1000 for name in known}
    return {name: seconds for name, seconds in found.items() if seconds != pytest.approx(known[name], rel=0.02)}


@pytest.mark.parametrize("per_event", [1, 4])
def test_a_server_of_known_latency_is_reported_within_two_percent(per_event: int) -> None:
    lasts = TTFT + (EVENTS - 1) * ITL
    known = {"ttft": TTFT, "itl": ITL, "e2el": lasts, "tpot": (lasts - TTFT) / (EVENTS * per_event - 1)}
    duration = pytest.approx(5 * 0.17 + lasts, rel=0.05)
    workload = spaced(6, 0.17, EVENTS * per_event)
    with fake_server(Behavior(ttft=TTFT, itl=ITL, per_event=per_event)) as url:
        target = BenchTarget(url, model="fake")
        for _ in range(ATTEMPTS):
            measured = measure(target, workload, Phrasing())
            result = serving_result(target, workload, measured, GoodputLimits.parse(["ttft:5000", "tpot:1000"]))
            if not beyond_two_percent(result, known) and result["duration"] == duration:
                break
    assert not beyond_two_percent(result, known) and result["duration"] == duration
    assert (result["completed"], result["max_concurrent_requests"]) == (6, 6)
    assert result["total_output_tokens"] == 6 * EVENTS * per_event
    assert result["total_input_tokens"] == 6 * 20
    assert result["output_throughput"] == pytest.approx(result["total_output_tokens"] / result["duration"])
    assert result["request_goodput"] == result["request_throughput"]
    json.dumps(result, allow_nan=False)


def test_chat_is_timed_from_its_first_text_and_asked_in_words() -> None:
    with fake_server(Behavior(ttft=0.3, itl=0.02)) as url:
        (outcome,) = run(url, spaced(1, 0, 5), endpoint=CHAT).outcomes
        (body,) = seen(url)["bodies"]
    assert outcome.ttft >= 0.29, "the opening event has no text"
    assert len(outcome.token_times) == outcome.num_output == 5
    (message,) = body["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 20


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_a_token_counts_when_it_comes_whatever_text_it_gives(endpoint: str) -> None:
    with fake_server(Behavior(ttft=0.1, itl=0.1, kinds=[HALVES])) as url:
        (outcome,) = run(url, spaced(1, 0, 4), endpoint=endpoint).outcomes
    assert len(outcome.token_times) == outcome.num_output == 4
    assert outcome.ttft < outcome.token_times[-1] - outcome.sent


def test_an_end_without_text_is_no_gap_between_tokens() -> None:
    with fake_server(Behavior(itl=0.05, kinds=[SILENT_ENDING])) as url:
        (outcome,) = run(url, spaced(1, 0, 3)).outcomes
    assert len(outcome.itls) == 2
    assert outcome.ended > outcome.token_times[-1]


def test_requests_ask_for_their_own_length_unless_lengths_are_hidden() -> None:
    workload = generate(Recipe(5, Fixed(7), Uniform(2, 9), max_tokens=20), 3)
    outputs = [request.num_output for request in workload.requests]
    with fake_server(Behavior()) as url:
        told = [outcome.num_output for outcome in by_number(run(url, workload))]
        hidden = [outcome.num_output for outcome in by_number(run(url, workload, Phrasing(hidden_lengths=True)))]
        bodies = seen(url)["bodies"]
    assert told == hidden == outputs
    assert sorted(body["max_tokens"] for body in bodies[:5]) == sorted(outputs)
    assert not any("bench_output_tokens" in body for body in bodies[:5])
    assert {body["max_tokens"] for body in bodies[5:]} == {20}
    assert sorted(body["bench_output_tokens"] for body in bodies[5:]) == sorted(outputs)
    for body in bodies:
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
        assert body["ignore_eos"] is True and body["temperature"] == 0 and body["model"] == "fake"
        assert len(body["prompt"]) == 7 and all(10 <= token < 4000 for token in body["prompt"])


def test_words_stand_for_ids_where_asked() -> None:
    workload = generate(Recipe(2, Fixed(5), Fixed(2), prefixes=Prefixes(1, 30)), 0)
    with fake_server(Behavior()) as url:
        run(url, workload, Phrasing(text_prompts=True, ignore_eos=False))
        bodies = seen(url)["bodies"]
    first, second = (body["prompt"].split() for body in bodies)
    assert len(first) == len(second) == 35
    assert first[:30] == second[:30] and first != second
    assert not any("ignore_eos" in body for body in bodies)


def test_rejections_and_errors_are_counted_apart() -> None:
    kinds = ["answers", "busy", "overloaded", "broken", CUT, ERROR_EVENT, NO_USAGE, "not found"]
    with fake_server(Behavior(kinds=kinds)) as url:
        target, workload = BenchTarget(url, model="fake"), generate(Recipe(8, Fixed(3), Fixed(4), Closed(1)))
        measured = measure(target, workload, Phrasing(), num_warmups=0)
    result = serving_result(target, workload, measured, GoodputLimits({}))
    assert (result["completed"], result["rejected"], result["failed"]) == (1, 3, 4)
    assert result["statuses"] == [
        "completed", "rejected", "rejected", "failed", "failed", "failed", "failed", "rejected"]
    assert result["errors"][0] == ""
    assert result["errors"][1] == "429: this is busy"
    assert result["errors"][3] == "500: this is broken"
    assert "the engine failed" in result["errors"][5]
    assert "no usage" in result["errors"][6]
    assert result["errors"][4]
    assert result["total_output_tokens"] == 4


def test_an_open_loop_does_not_wait_and_a_closed_one_does() -> None:
    recipe = Recipe(6, Fixed(3), Fixed(2))
    with fake_server(Behavior(ttft=2.0)) as url:
        run(url, generate(recipe))
        assert seen(url)["most_at_once"] == 6
    with fake_server(Behavior(ttft=0.1)) as url:
        closed = run(url, generate(Recipe(6, Fixed(3), Fixed(2), Closed(2))))
        assert seen(url)["most_at_once"] == 2
        assert closed.duration >= 3 * 0.1


def test_warm_up_requests_are_short_and_do_not_count() -> None:
    workload = generate(Recipe(2, Fixed(4), Fixed(50)))
    with fake_server(Behavior()) as url:
        measured = measure(BenchTarget(url, model="fake"), workload, Phrasing(), num_warmups=3)
        bodies = seen(url)["bodies"]
    assert len(measured.outcomes) == 2
    assert [body["max_tokens"] for body in bodies] == [16, 16, 16, 50, 50]
    assert len({tuple(body["prompt"]) for body in bodies}) == 5


def test_a_server_that_refuses_the_warm_up_is_not_measured() -> None:
    with fake_server(Behavior(kinds=["not found"])) as url, pytest.raises(BenchError, match="this is not found"):
        measure(BenchTarget(url, model="fake"), spaced(1, 0, 1), Phrasing())


@pytest.mark.parametrize(("card", "vocab_size"), [
    ({"id": "a"}, 4000), ({"id": "a", "vocab_size": 77}, 77), ({"id": "a", "meta": {"n_vocab": 99}}, 99),
    ({"id": "a", "meta": {"n_vocab": "many"}}, 4000),
])
def test_model_and_vocabulary_are_the_servers_where_it_tells(card: dict[str, Any], vocab_size: int) -> None:
    with fake_server(Behavior(model_card=card)) as url:
        assert resolve(BenchTarget(f"{url}/v1/")) == (BenchTarget(url, model="a"), vocab_size)
        assert resolve(BenchTarget(url, model="b"), 5) == (BenchTarget(url, model="b"), 5)


def test_a_key_is_sent_and_asked_for() -> None:
    with fake_server(Behavior(api_key="secret")) as url:
        assert resolve(BenchTarget(url, api_key="secret"))[0].model == "fake"
        with pytest.raises(BenchError, match="--api-key"):
            resolve(BenchTarget(url))
        assert "secret" not in repr(BenchTarget(url, api_key="secret"))


def test_no_server_is_one_clear_line() -> None:
    with fake_server(Behavior()) as url:
        pass
    with pytest.raises(BenchError, match=f"no server answers at {url}"):
        resolve(BenchTarget(url))


def test_targets_and_phrasings_that_cannot_be_are_refused() -> None:
    for arguments in ({"base_url": "localhost:8000"}, {"base_url": "http://a", "endpoint": "/v1/embeddings"}):
        with pytest.raises(ValueError, match=r"http://|/v1/completions"):
            BenchTarget(**arguments)
    for arguments in ({"vocab_size": 0}, {"temperature": -1.0}, {"hidden_lengths": True, "ignore_eos": False}):
        with pytest.raises(ValueError, match="--"):
            Phrasing(**arguments)


def test_the_offered_rate_is_that_of_the_arrivals() -> None:
    assert offered_rate(spaced(5, 0.5, 1)) == 2.0
    assert offered_rate(generate(Recipe(5, Fixed(1), Fixed(1), AtOnce()))) == "inf"
    assert offered_rate(generate(Recipe(5, Fixed(1), Fixed(1), Closed(2)))) == "inf"
    assert offered_rate(generate(Recipe(5000, Fixed(1), Fixed(1), Poisson(3)))) == pytest.approx(3, rel=0.1)
