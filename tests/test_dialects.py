"""Responses, Messages and embeddings of the built-in model behind a real server, by their own clients, at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pydantic
import pytest
from support.live import Live, serving

from slotwise.measure.simulate.replay import replay
from slotwise.observe import event_log, log_file

MODEL = "slotwise-builtin"
SIGNATURES = ("def is_empty(self):", "def read_lines(path):", "def close(self):", "def get(self, key):")


pytestmark = pytest.mark.slow


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dialects")


@pytest.fixture(scope="module")
def live(log: Path) -> Iterator[Live]:
    with serving("--dtype", "float32", "--max-num-seqs", "8", "--event-log", str(log / "events"), log=log / "log") as (
            server):
        yield server


@pytest.fixture(scope="module")
def client(live: Live, openai: ModuleType) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(live: Live, anthropic: ModuleType) -> Any:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0)


def test_every_route_gives_the_same_text_while_all_run(client: Any, claude: Any) -> None:
    def chat(text: str) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=24, temperature=0)
        return answer.choices[0].message.content

    def response(text: str) -> str:
        return client.responses.create(model=MODEL, input=text, max_output_tokens=24, temperature=0).output_text

    def message(text: str) -> str:
        with claude.messages.stream(model=MODEL, max_tokens=24, extra_body={"temperature": 0},
                                    messages=[{"role": "user", "content": text}]) as stream:
            return "".join(stream.text_stream)

    def vector(text: str) -> list[float]:
        return client.embeddings.create(model=MODEL, input=text).data[0].embedding

    expected = {text: (chat(text), vector(text)) for text in SIGNATURES}
    assert all(said for said, _ in expected.values())
    with ThreadPoolExecutor(16) as pool:
        work = [(text, kind, pool.submit(kind, text)) for text in SIGNATURES for kind in (
            chat, response, message, vector)]
        for text, kind, done in work:
            if kind is vector:
                assert done.result() == pytest.approx(expected[text][1], abs=2e-5)
            else:
                assert done.result() == expected[text][0], kind


def test_answers_parse(client: Any, claude: Any, openai: ModuleType, anthropic: ModuleType) -> None:
    response = client.responses.parse(
        model=MODEL, input="def person():", text_format=Person, max_output_tokens=200, temperature=1.0)
    assert isinstance(response.output_parsed, Person)
    with client.responses.stream(model=MODEL, input="def person():", text_format=Person) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)
    form = {"type": "json_schema", "schema": Person.model_json_schema()}
    message = claude.messages.create(model=MODEL, max_tokens=200, output_config={"format": form},
                                     messages=[{"role": "user", "content": "def person():"}])
    assert Person.model_validate_json(message.content[0].text)
    wrong = {"type": "json_schema", "name": "n", "schema": {"type": "no such type"}}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=MODEL, input="x", text={"format": wrong})
    assert error.value.param == "text.format"
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        claude.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "x"}],
                               output_config={"format": {"type": "json_schema", "schema": {"type": "no such type"}}})


def test_required_calls_are_calls(client: Any, claude: Any) -> None:
    schema = Person.model_json_schema()
    said = [{"role": "user", "content": "def person():"}]
    tool = {"name": "person", "description": "d", "input_schema": schema}
    for choice in ({"type": "any"}, {"type": "tool", "name": "person"}):
        one = choice | {"disable_parallel_tool_use": True}
        asked = {"model": MODEL, "max_tokens": 200, "messages": said, "tools": [tool], "tool_choice": one}
        whole = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for message in (whole, streamed):
            (block,) = message.content
            assert (block.type, block.name, message.stop_reason) == ("tool_use", "person", "tool_use")
            Person.model_validate(block.input)
    function = {"type": "function", "name": "person", "parameters": schema, "strict": True}
    for chosen in ("required", {"type": "function", "name": "person"}):
        response = client.responses.create(model=MODEL, input="def person():", tools=[function], tool_choice=chosen,
                                           parallel_tool_calls=False)
        (item,) = response.output
        assert (item.type, item.name, response.status) == ("function_call", "person", "completed")
        Person.model_validate_json(item.arguments)


def test_the_log_of_all_replays(live: Live, log: Path) -> None:
    """Last: the server has ended its work by then."""
    live.process.terminate()
    live.process.wait(120)
    outcome = replay(log_file.read_file(log / "events"))
    assert outcome.difference is None and outcome.requests >= 24
    pooled = [entry for entry in log_file.read_file(log / "events")
              if isinstance(entry, event_log.RequestEntry) and entry.spec.pooling is not None]
    assert len(pooled) == 2 * len(SIGNATURES) and json.loads(event_log.encode(pooled[0]))["add"]["spec"]["pooling"]
