"""Structured output of the built-in model behind a real server: clients, replays, hostile grammars, other streams."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import jsonschema
import pydantic
import pytest
from msgspec import structs
from support.live import Live, serving
from support.live_server import eventually

from slotwise.api.generate.output_constraints import CHECK_LIMITS, GrammarChecker
from slotwise.api.http.api_errors import ApiError
from slotwise.core.params import LARK, Grammar
from slotwise.core.record import StepRecord
from slotwise.measure.simulate.replay import replay
from slotwise.observe import event_log, log_file

MODEL = "slotwise-builtin"
PERSON = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
    "properties": {"name": {"type": "string", "maxLength": 12},
                   "age": {"type": "integer", "minimum": 0, "maximum": 150},
                   "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["a", "b", "c"]}}}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("structured")


@pytest.fixture(scope="module")
def live(log: Path) -> Iterator[Live]:
    with serving("--dtype", "float32", "--max-num-seqs", "8", "--event-log", str(log / "events"),
                 log=log / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live, openai: ModuleType) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def completed(live: Live, **body: Any) -> dict[str, Any]:
    response = live.client.post(COMPLETIONS, json={"prompt": "def add(a, b):", "max_tokens": 200} | body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def refused(live: Live, param: str, **body: Any) -> str:
    response = live.client.post(COMPLETIONS, json={"prompt": "def add(a, b):", "max_tokens": 200} | body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: ")
    return str(error["message"])


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("field", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}},
    {"response_format": {"type": "json_object", "schema": PERSON}},
    {"structured_outputs": {"json": PERSON}}, {"structured_outputs": {"json": json.dumps(PERSON)}},
    {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}, {"guided_json": PERSON}],
    ids=lambda field: ",".join(field))
def test_json_of_a_schema(live: Live, field: dict[str, Any], temperature: float) -> None:
    choice = completed(live, temperature=temperature, seed=3, **field)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), PERSON)
    if field.get("structured_outputs", {}).get("disable_any_whitespace"):
        assert not re.search(r"\s", re.sub(r'"[^"]*"', "", choice["text"]))


def test_any_object_choices_and_regular_expressions(live: Live) -> None:
    text = completed(live, response_format={"type": "json_object"}, temperature=1, seed=1, max_tokens=400)
    assert text["finish_reason"] == "length" or isinstance(json.loads(text["text"]), dict)
    for seed in range(4):
        assert completed(live, guided_choice=["yes", "no", "é\n"], seed=seed)["text"] in ("yes", "no", "é\n")
        found = completed(live, structured_outputs={"regex": "[a-f]{3}-[0-9]{2,4}"}, seed=seed)
        assert re.fullmatch("[a-f]{3}-[0-9]{2,4}", found["text"]) and found["finish_reason"] == "stop"
    rule = 'start: item ("," item)*\nitem: "x" | "(" start ")"'
    assert set(completed(live, guided_grammar=rule, seed=5, max_tokens=20)["text"]) <= set("x(),")


def test_a_grammar_in_gbnf(live: Live) -> None:
    sql = """
    root ::= "SELECT " column " from " table  # as llama.cpp and vLLM write it
    column ::= "col_1 " | [a-c]{2}
    table ::= ("table_1" | "table_2") " "?
    """
    for seed in range(3):
        text = completed(live, structured_outputs={"grammar": sql}, seed=seed, temperature=1, max_tokens=60)["text"]
        assert re.fullmatch(r"SELECT (col_1 |[a-c]{2}) from table_[12] ?", text)
    for grammar, told in (('root ::= "a" b', "b"), ('rule ::= "a"', "root"), ('root ::= "a', "end of input"),
                          ('root ::= "a"\n' * 300, "256 rules")):
        answer = live.client.post(COMPLETIONS, json={"prompt": "x", "structured_outputs": {"grammar": grammar}})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "structured_outputs") and told in error["message"]


def test_tags_within_free_text(live: Live) -> None:
    tag = {"type": "structural_tag", "triggers": ["<f"], "structures": [
        {"begin": "<f>", "schema": {"type": "integer", "minimum": 1, "maximum": 5}, "end": "</f>"}]}
    for seed in range(3):
        text = completed(live, response_format=tag, logit_bias={}, seed=seed, max_tokens=40)["text"]
        assert all(re.match(r"<f>[1-5]</f>", text[at.start():]) for at in re.finditer("<f>[^<]*</f>", text))


def test_every_choice_and_its_log_probabilities(live: Live) -> None:
    response = live.client.post(COMPLETIONS, json={
        "prompt": ["def a(", "class B"], "n": 3, "max_tokens": 60, "logprobs": 4, "presence_penalty": 0.5, "seed": 2,
        "structured_outputs": {"json": PERSON, "disable_any_whitespace": True}})
    choices = response.json()["choices"]
    assert len({choice["text"] for choice in choices}) > 1 and len(choices) == 6
    for choice in choices:
        assert choice["finish_reason"] in ("stop", "length")
        assert all(entry is not None and -1e4 < entry <= 0 for entry in choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), PERSON)


def test_the_parse_helper_of_the_openai_client(client: Any) -> None:
    class Colour(Enum):
        RED, BLUE = "red", "blue"

    class Car(pydantic.BaseModel):
        doors: int = pydantic.Field(ge=2, le=5)
        colour: Colour
        owner: str | None

    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "def car():"}], response_format=Car, seed=seed,
            max_tokens=300)
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(answer.choices[0].message.parsed, Car)
            return
    raise AssertionError("no answer ended")


def test_what_is_not_compiled_is_refused_by_its_keyword(live: Live) -> None:
    told = refused(live, "response_format", response_format={"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "array", "uniqueItems": True}}})
    assert "Invalid schema for response_format" in told and "uniqueItems" in told  # LangChain looks for the first
    assert "propertyNames" in refused(
        live, "structured_outputs", structured_outputs={"json": {"type": "object", "propertyNames": {"pattern": "a"}}})
    assert "look-around" in refused(live, "guided_regex", guided_regex="(?=a)b")
    assert "Unsatisfiable" in refused(live, "guided_json", guided_json={"enum": []})
    for name, value in (("min_tokens", 3), ("ignore_eos", True), ("allowed_token_ids", [70]), ("bad_words", ["x"])):
        response = live.client.post(COMPLETIONS, json={"prompt": "a", "guided_regex": "a", name: value})
        assert response.status_code == 400 and response.json()["error"]["param"] == name
    assert "guided_json" in refused(live, "guided_regex", guided_regex="a", guided_json={})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def hostile() -> list[dict[str, Any]]:
    draw = random.Random(7)
    words = ["".join(draw.choice("abcdef ") for _ in range(12)) for _ in range(10_000)]
    node = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
        "a": {"$ref": "#/$defs/n"}, "b": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}}}
    return [
        {"guided_regex": "(.*a){20}.{20}"}, {"guided_regex": "((a{1,100}){1,100}){1,100}"},
        {"guided_regex": "(a|b)*a(a|b){24}"}, {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
        {"guided_regex": "(.*[ab].*[bc].*[cd].*){10}(x|y)*x(.|y){30}"},
        {"guided_choice": words}, {"guided_json": {"enum": words}}, {"guided_json": nested(20)},
        {"guided_json": nested(40)}, {"guided_json": node}, {"guided_json": {"$ref": "#"}},
        {"guided_json": {"type": "integer", "multipleOf": 99_991}},
        {"guided_grammar": "start: start start | \"a\" | "},
        {"guided_grammar": "start: x x x x x x\nx: x x | /[a-z ]+/ | "},
        {"guided_grammar": "start: " + "(" * 900 + '"a"' + ")" * 900},
        {"guided_grammar": "root ::= " + "(" * 8000 + '"a"' + ")" * 8000},
        {"guided_grammar": "".join(f'r{i} ::= r{i - 1} r{i - 1}\n' for i in range(1, 99)) + 'root ::= r98\nr0 ::= "a"'},
        {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}}]


async def gaps(url: str, until: asyncio.Event) -> list[float]:
    """Seconds between the events of a stream; streams follow each other with pauses, which spare the processor."""
    found = []
    body = {"prompt": "def add(a, b):", "max_tokens": 40, "ignore_eos": True, "stream": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while not until.is_set():
            async with http.stream("POST", COMPLETIONS, json=body) as response:
                last = 0.0
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        found += [now - last] if last else []
                        last = now
            await asyncio.sleep(0.2)
    return found


def test_hostile_grammars_end_and_other_streams_go_on(live: Live) -> None:
    def ask(field: dict[str, Any]) -> int:
        with httpx.Client(base_url=live.url, timeout=120) as http:
            body = {"prompt": "def add(a, b):", "max_tokens": 40, "temperature": 1, "seed": 1} | field
            response = http.post(COMPLETIONS, json=body)
            if response.status_code == 200:
                assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")
            else:
                assert response.json()["error"]["message"], response.text
            return response.status_code

    async def run() -> tuple[list[int], list[float]]:
        until = asyncio.Event()
        streams = asyncio.create_task(gaps(live.url, until))
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(8) as threads:
            statuses = await asyncio.gather(*[loop.run_in_executor(threads, ask, field) for field in hostile()])
        until.set()
        return list(statuses), await streams

    statuses, found = asyncio.run(run())
    assert set(statuses) <= {200, 400} and statuses[0] == 200 and 400 in statuses
    assert statuses[5] == 200, "ten thousand choices are a grammar"
    print(f"gaps of other streams: longest {max(found) * 1e3:.0f} ms of {len(found)}; {statuses}")


def test_a_grammar_that_compiles_for_too_long_is_refused() -> None:
    """A schema within a grammar is not checked for large values of `multipleOf`; the worker's time limit ends it."""
    checker = GrammarChecker((), structs.replace(CHECK_LIMITS, seconds=0.3))
    grammar = Grammar(LARK, 'start: %json {"type": "integer", "multipleOf": 7919131}', "guided_grammar")
    try:
        with pytest.raises(ApiError, match="guided_grammar: compiling the grammar took more than"):
            asyncio.run(checker.check(grammar, "client"))
    finally:
        checker.close()


def test_the_log_replays_and_says_what_was_waited_for(live: Live, log: Path) -> None:
    completed(live, guided_regex="[xyz]{7}", request_id="logged")
    entries: list[event_log.Entry] = []

    def is_written() -> bool:
        """Whether the log, which is written behind the responses, has the end of this request."""
        entries[:] = log_file.read_file(log / "events")
        logged = [entry.number for entry in entries
                  if isinstance(entry, event_log.RequestEntry) and entry.id.startswith("cmpl-logged-")]
        steps = [entry for entry in entries if isinstance(entry, StepRecord)]
        return any(end.request_id in logged for step in steps for end in step.ended)

    eventually(is_written)
    found = replay(entries)
    assert found.difference is None and found.records > 10
    compiled = [one for entry in entries if isinstance(entry, StepRecord) for one in entry.inputs.compiled]
    assert any(not one.objection for one in compiled)
    reasons = {refused.reason for entry in entries if isinstance(entry, StepRecord) for refused in entry.plan.refused}
    assert "grammar_compiling" in reasons
