"""Numbers of every kind in every numeric field: each is served or refused by the field's name, and nothing breaks."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.live_server import JSON, Server

from slotwise.api.admin.event_stream import SWITCHES
from slotwise.api.limits.tiers import TierSettings
from slotwise.api.protocol.admin_protocol import DetokenizeRequest, TokenizeRequest
from slotwise.api.protocol.protocol import ChatRequest, CompletionRequest
from slotwise.core.params import MAX_BIAS, RANGES
from slotwise.engine.scheduling import changes_schema
from slotwise.observe import event_log

COMPLETIONS, CHAT, ADMIN = "/v1/completions", "/v1/chat/completions", "/admin/scheduling"
NUMBERS = ("0", "-0.0", "1", "-1", "0.5", "-0.5", "5e-324", "1e-320", "1e-38", "1e-45", "1e-30", "1e38", "1e308",
           "-1e308", "100", "100.0", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", str(2**31), str(2**53 + 1),
           str(2**63 - 1), str(2**63), str(-(2**63)), str(2**64), str(2**70), str(-(2**70)), "9" * 400)
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_step_ms", "max_stall_ms")
SCHEDULING = [name for name, schema in changes_schema()["properties"].items()
              if any(kind in json.dumps(schema) for kind in ('"integer"', '"number"'))]
WRONG = ("true", "false", '"1"', '"nan"', "[]", "[1]", "[[1]]", "{}", '{"a":1}', '""')
BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    COMPLETIONS: (CompletionRequest, {"prompt": [2], "max_tokens": 2}),
    CHAT: (ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [2]}),
}


def is_numeric(annotation: Any) -> bool:
    """Whether a number may stand somewhere in such a field."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return any(map(is_numeric, typing.get_args(annotation)))
    return annotation in (int, float)


def numeric_fields(kind: type) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind) if is_numeric(field.type)]


def cases() -> Iterator[tuple[str, str]]:
    for path, (kind, _) in BODIES.items():
        for name in numeric_fields(kind):
            yield path, name


def written(body: dict[str, Any], name: str, value: str) -> str:
    fields = {key: json.dumps(other) for key, other in body.items()} | {name: value}
    return "{" + ",".join(f'"{key}":{text}' for key, text in fields.items()) + "}"


def names_it(answer: Any, name: str) -> bool:
    error = answer.json()["error"]
    return error["type"] == "invalid_request_error" and (error["param"] == name or name in error["message"])


def test_the_fields_that_are_walked_are_those_of_sampling() -> None:
    assert set(RANGES) - {"max_tokens", "logprobs"} < set(numeric_fields(ChatRequest))
    assert {"stop_token_ids", "logit_bias", "queue_timeout", "ttft_ms", "priority"} < set(numeric_fields(ChatRequest))


@pytest.mark.parametrize(("path", "name"), [*cases()])
def test_a_field_takes_any_value_or_is_named(server: Server, path: str, name: str) -> None:
    body = BODIES[path][1]
    served = 0
    for value in (*NUMBERS, *WRONG, *(f"[{number}]" for number in NUMBERS)):
        answer = server.post(path, written(body, name, value))
        assert answer.status_code in (200, 400), (name, value, answer.text)
        if answer.status_code == 200:
            served += 1
        else:
            assert names_it(answer, name), (name, value, answer.text)
    assert served or name == "retain", "every field has a value that is right"  # under lru nothing is retained
    for line in server.get("/events?follow=0").content.splitlines():
        event_log.decode(line)
    assert server.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("value", NUMBERS)
def test_biases_of_any_token_by_any_number(server: Server, value: str) -> None:
    for bias in (f'{{"{value}":1}}', f'{{"5":{value}}}', f'{{"{value}":{value}}}'):
        answer = server.post(COMPLETIONS, written(BODIES[COMPLETIONS][1], "logit_bias", bias))
        assert answer.status_code in (200, 400), (bias, answer.text)
        assert answer.status_code == 200 or names_it(answer, "logit_bias"), answer.text
    assert server.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("name", sorted(SCHEDULING))
def test_a_setting_of_the_scheduler_takes_any_value_or_is_named(server: Server, name: str) -> None:
    kind = {"batch_size": {"batching": "static"}, "max_wait_ms": {"batching": "dynamic"},
            "preemption_gap": {"scheduling_policy": "priority"}, "ageing": {"scheduling_policy": "priority"},
            "length_quantile": {"scheduling_policy": "shortest"},
            "default_ttft_ms": {"scheduling_policy": "deadline"}}.get(name, {})
    before = server.get(ADMIN).json()
    try:
        for value in (*NUMBERS, *WRONG):
            answer = server.client.put(server.url + ADMIN, headers=JSON, content=written(kind, name, value))
            assert answer.status_code in (200, 400), (value, answer.text)
            assert answer.status_code == 200 or names_it(answer, name), (value, answer.text)
            generated = server.post(COMPLETIONS, BODIES[COMPLETIONS][1])
            assert generated.status_code == 200, (value, generated.text)
    finally:
        back = {key: before[key] for key in ("batching", "scheduling_policy", *LIMITS)}
        assert server.client.put(server.url + ADMIN, json=back).status_code == 200


@pytest.mark.parametrize("name", numeric_fields(TierSettings))
def test_a_number_of_a_tier_is_checked(server: Server, name: str) -> None:
    try:
        for value in NUMBERS:
            tier = written({"name": "t"}, name, value)
            body = f'{{"tiers":[{tier}],"scheduling_policy":"fair"}}'
            answer = server.client.put(server.url + ADMIN, headers=JSON, content=body)
            assert answer.status_code in (200, 400), (value, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"], (value, answer.text)
            if answer.status_code == 200:
                generated = server.post(COMPLETIONS, BODIES[COMPLETIONS][1])
                assert generated.status_code == 200, (value, generated.text)
    finally:
        answer = server.client.put(server.url + ADMIN, json={"tiers": [], "scheduling_policy": "fcfs"})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [*NUMBERS, "true", ""])
def test_a_query_parameter_is_checked(server: Server, name: str, value: str) -> None:
    query = f"{name}={value}" + ("&follow=0" if name != "follow" or value not in ("0", "1") else "")
    if query == "follow=1":
        return  # never ends
    answer = server.get(f"/events?{query}")
    assert answer.status_code == (200 if value in ("0", "1") else 400)
    assert answer.status_code == 200 or names_it(answer, name)


@pytest.mark.parametrize("value", [*NUMBERS, *WRONG])
def test_names_to_abort_are_strings(server: Server, value: str) -> None:
    for name in ("request_id", "request_ids"):
        answer = server.post("/abort_requests", f'{{"{name}":{value}}}')
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or names_it(answer, name), answer.text


def test_prompts_times_n_is_bounded(server: Server) -> None:
    answer = server.post(COMPLETIONS, {"prompt": [[2]] * 100, "n": 128, "max_tokens": 1})
    assert answer.status_code == 400 and names_it(answer, "n")
    answer = server.post(COMPLETIONS, {"prompt": [[2]] * 4097, "max_tokens": 1})
    assert answer.status_code == 400 and names_it(answer, "prompt")


@pytest.mark.parametrize("stop", ["", "x" * 1025, ["x"] * 65, [""], ["x", ""], [1]])
def test_stop_strings_are_bounded(server: Server, stop: Any) -> None:
    answer = server.post(COMPLETIONS, BODIES[COMPLETIONS][1] | {"stop": stop})
    assert answer.status_code == 400 and names_it(answer, "stop")


def numbers_of(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each number that a schema describes, and where."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for key, inner in schema.items():
            yield from numbers_of(inner, f"{path}/{key}")
    elif isinstance(schema, list):
        for inner in schema:
            yield from numbers_of(inner, path)


def test_every_number_of_a_body_is_described_with_its_range(server: Server) -> None:
    document = server.get("/openapi.json").json()
    changes = document["paths"][ADMIN]["put"]["requestBody"]["content"]["application/json"]["schema"]
    found = [*numbers_of(document["components"]["schemas"]), *numbers_of(changes)]
    assert len(found) > 40
    for path, schema in found:
        least = schema.get("minimum", schema.get("exclusiveMinimum"))
        assert least is not None and schema.get("maximum", schema.get("exclusiveMaximum")) is not None, (path, schema)
    bias = document["components"]["schemas"]["ChatRequest"]["properties"]["logit_bias"]["anyOf"][0]
    assert bias["additionalProperties"]["maximum"] == MAX_BIAS
