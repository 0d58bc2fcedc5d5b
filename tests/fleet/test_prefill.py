"""Which prompts the door has computed elsewhere, and with which bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from slotwise.core.routing.fleet import Fleet, Shed
from slotwise.core.routing.prompt import RoutedRequest
from slotwise.core.routing.replica import Report
from slotwise.core.routing.routers import LeastProduct
from slotwise.fleet.door import PrefillQueue
from slotwise.fleet.forward import Prefill, _for_prompt, _has_one_prompt

SENDS, RECEIVES = Report(4, sends_prompts=True, kv_host="h", kv_port=1), Report(4, receives_prompts=True)
BOTH, ALONE = Report(4, sends_prompts=True, receives_prompts=True), Report(4)


def fields(**body: object) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw])


@pytest.mark.parametrize("body", [
    {"prompt": "a"}, {"prompt": [1, 2]}, {"prompt": [ 7]}, {"messages": [], "n": 1}, {"prompt": "a", "n": None},
    {"prompt": "a", "echo": False, "prompt_logprobs": None, "kv_transfer_params": None}])
def test_one_prompt_may_travel(body):
    assert _has_one_prompt(fields(**body))


@pytest.mark.parametrize("body", [
    {"prompt": ["a"]}, {"prompt": [[1, 2]]}, {"prompt": []}, {"prompt": "a", "n": 2}, {"prompt": "a", "echo": True},
    {"input": "a", "previous_response_id": "b"},
    {"prompt": "a", "prompt_logprobs": 0}, {"prompt": "a", "kv_transfer_params": {}}, {"prompt": {"a": 1}}])
def test_others_stay(body):
    assert not _has_one_prompt(fields(**body))


def test_a_prompt_is_asked_for_with_one_token_and_whole():
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [], "max_completion_tokens": 9, "stream": True,
            "stream_options": {"include_usage": True}, "min_tokens": 5, "temperature": 0.5}
    sent = {"do_remote_decode": True, "transfer_id": "t"}
    assert json.loads(_for_prompt(fields(**chat), "t", "/v1/chat/completions")) == {
        "messages": chat["messages"], "tools": [], "temperature": 0.5, "max_tokens": 1, "kv_transfer_params": sent}
    assert json.loads(_for_prompt(fields(prompt="a"), "t", "/v1/completions"))["max_tokens"] == 1
    response = fields(input="a", max_output_tokens=7, store=True, stream=True)
    assert json.loads(_for_prompt(response, "t", "/v1/responses")) == {
        "input": "a", "max_output_tokens": 1, "store": False, "kv_transfer_params": sent}


def test_prompts_take_turns_in_the_order_in_which_they_were_sent():
    prompts = PrefillQueue()
    first, second, third, other = (prompts.join(*one) for one in (("p", "a"), ("p", "b"), ("p", "c"), ("q", "d")))
    assert [turn.is_set() for turn in (first, second, third, other)] == [True, False, False, True]
    prompts.leave("p", "b")  # its client has left
    assert second.is_set() and not third.is_set()
    prompts.leave("p", "a")
    assert third.is_set()
    prompts.leave("p", "c")
    assert prompts.join("p", "e").is_set()


def test_replicas_are_chosen_by_their_roles():
    fleet = Fleet(LeastProduct())
    for name, report in (("sends", SENDS), ("receives", RECEIVES), ("both", BOTH), ("alone", ALONE)):
        fleet.add(name)
        fleet.update(name, report, 0.0)
    assert [one.name for one in fleet.usable()] == ["receives", "both", "alone"]
    assert [one.name for one in fleet.usable(for_prompts=True)] == ["sends", "both"]
    chosen = fleet.route(RoutedRequest("a"), 0.0, for_prompts=True, without=["both"])
    assert not isinstance(chosen, Shed) and chosen.name == "sends"
    fleet.closed("sends")
    assert isinstance(fleet.route(RoutedRequest("b"), 0.0, for_prompts=True, without=["both"]), Shed)
    answering = fleet.route(RoutedRequest("c", 500.0), 0.0)
    assert not isinstance(answering, Shed) and answering.lacked("c") == 500.0
    fleet.check()


def test_a_second_attempt_has_its_prompt_computed_while_the_first_is_being_given_up():
    """The first replica was lost before the prompt was computed: nothing is awaited between the attempts."""
    fleet, sent = Fleet(LeastProduct()), []
    for name, report in (("p", SENDS), ("d1", RECEIVES), ("d2", RECEIVES)):
        fleet.add(name)
        fleet.update(name, report, 0.0)

    @contextlib.asynccontextmanager
    async def sending(method, path, headers, body):
        sent.append(json.loads(body)["kv_transfer_params"]["transfer_id"])
        await asyncio.Event().wait()
        yield

    upstream = SimpleNamespace(until_lost=contextlib.AsyncExitStack, sending=sending)
    door = SimpleNamespace(
        fleet=fleet, prompts=PrefillQueue(), may_transfer=True, settings=SimpleNamespace(kv_transfer_secret="s"),
        metrics=SimpleNamespace(prefills=Counter(), failed_prefills=0), replicas=SimpleNamespace(
            upstream=lambda name: upstream), request_of=lambda prompt, name: RoutedRequest(name, 500.0))
    prefill = Prefill(door, "/v1/completions", {}, b'{"prompt": "a", "max_tokens": 5}', None)

    async def attempts():
        travelling = []
        for other in ("d2", "d1"):
            chosen = fleet.route(RoutedRequest("7", 500.0), 0.0, {other})
            body, _ = await prefill.begin(chosen.name, "7", ())
            travelling.append(json.loads(body)["kv_transfer_params"]["transfer_id"])
            if chosen.name == "d1":
                prefill.end()
                fleet.finished("7")
        await asyncio.sleep(0.01)
        assert travelling[0] != travelling[1] == sent[-1]
        prefill.end()
        await asyncio.sleep(0.01)
        fleet.finished("7")

    asyncio.run(attempts())
    fleet.check()
    assert all(not one.num_sent for one in fleet.replicas)
