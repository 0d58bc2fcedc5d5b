"""OpenAI's client for Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

import openai
import pydantic
import pytest
from servers import MAX_TOKENS, MESSAGES, PROMPT, Server

CLIENT = "`openai` for Python"
VERSION = version("openai")
SETTING = ("`base_url` is `http://127.0.0.1:8000/v1`, and any `api_key` if the server has none; vLLM's "
           "fields go into `extra_body`.")
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS}
Refused = Callable[[str, object], None]


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["slot", "block"]


@pytest.fixture(scope="module")
def code(builtin: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=builtin.base_url, api_key=builtin.key, max_retries=0)


@pytest.fixture(scope="module")
def talk(chat: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=chat.base_url, api_key=chat.key, max_retries=0)


def test_completion(code: openai.OpenAI, builtin: Server) -> None:
    """Completes a prompt, whole."""
    answer = code.completions.create(model=builtin.model, prompt=PROMPT, **GREEDY)
    assert answer.choices[0].text == builtin.completion() != ""
    assert answer.usage is not None and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_stream(code: openai.OpenAI, builtin: Server) -> None:
    """Completes a prompt as a stream, with the token counts in the last event."""
    *chunks, last = code.completions.create(
        model=builtin.model, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == builtin.completion()
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert not last.choices and last.usage is not None and last.usage.completion_tokens > 0


def test_several_prompts(code: openai.OpenAI, builtin: Server) -> None:
    """Completes several prompts in one request, as texts and as token ids."""
    prompts = [PROMPT, "def is_empty(self):"]
    ids = [builtin.post("/tokenize", prompt=prompt)["tokens"] for prompt in prompts]
    expected = [builtin.completion(prompt) for prompt in prompts]
    for given in (prompts, ids):
        answer = code.completions.create(model=builtin.model, prompt=given, **GREEDY)
        assert [choice.text for choice in answer.choices] == expected


def test_chat(talk: openai.OpenAI, chat: Server) -> None:
    """Answers a conversation: system message and earlier turns reach the model."""
    answer = talk.chat.completions.create(
        model=chat.model, messages=MESSAGES, extra_body={"return_prompt_text": True}, **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == chat.chat() != ""
    rendered = "".join(f"<s>{turn['role']}\n{turn['content']}</s>\n" for turn in MESSAGES) + "<s>assistant\n"
    assert answer.model_extra is not None and answer.model_extra["prompt_text"] == rendered


def test_chat_stream(talk: openai.OpenAI, chat: Server) -> None:
    """Answers a conversation as a stream, with the token counts in the last event."""
    *chunks, last = talk.chat.completions.create(
        model=chat.model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.chat()
    assert not last.choices and last.usage is not None and last.usage.completion_tokens > 0


def test_chat_stream_helper(talk: openai.OpenAI, chat: Server) -> None:
    """Answers through the helper `chat.completions.stream`, which puts the message together."""
    stop = chat.chat()[8:10]  # the helper refuses an answer that its length ended
    with talk.chat.completions.stream(model=chat.model, messages=MESSAGES, stop=stop, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == chat.chat().partition(stop)[0]


def test_parts_of_a_message(talk: openai.OpenAI, chat: Server) -> None:
    """Accepts a message whose content is a list of texts."""
    parts = [{"type": "text", "text": MESSAGES[-1]["content"]}]
    answer = talk.chat.completions.create(
        model=chat.model, messages=[*MESSAGES[:-1], {"role": "user", "content": parts}], **GREEDY)
    assert answer.choices[0].message.content == chat.chat()


def test_async(chat: Server) -> None:
    """`AsyncOpenAI`: eight streams at once."""
    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=chat.model, messages=MESSAGES, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.key, max_retries=0) as client:
            return await asyncio.gather(*[streamed(client) for _ in range(8)])

    assert asyncio.run(all_of_them()) == [chat.chat()] * 8


def test_models(code: openai.OpenAI, builtin: Server) -> None:
    """Lists the model and retrieves it by its name."""
    assert [model.id for model in code.models.list()] == [builtin.model]
    assert code.models.retrieve(builtin.model).id == builtin.model


def test_logprobs_of_completions(code: openai.OpenAI, builtin: Server) -> None:
    """Log-probabilities of a completion, also with `echo`."""
    answer = code.completions.create(model=builtin.model, prompt=PROMPT, logprobs=2, echo=True, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    assert "".join(logprobs.tokens[1:]) == answer.choices[0].text == PROMPT + builtin.completion()
    assert logprobs.tokens[0] == "<|begin|>" and logprobs.token_logprobs[0] is None
    assert all(one <= 0 for one in logprobs.token_logprobs[1:])
    assert all(len(top) >= 2 for top in logprobs.top_logprobs[1:])


def test_logprobs_of_chats(talk: openai.OpenAI, chat: Server) -> None:
    """Log-probabilities of a chat, with `top_logprobs`."""
    answer = talk.chat.completions.create(model=chat.model, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content and answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_sampling(code: openai.OpenAI, builtin: Server) -> None:
    """`n`, `stop`, `seed`, `top_p` and penalties."""
    asked: dict[str, Any] = {"model": builtin.model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "n": 3, "seed": 7,
                             "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    texts = [choice.text for choice in code.completions.create(**asked).choices]
    assert texts == [choice.text for choice in code.completions.create(**asked).choices]
    assert len(set(texts)) > 1
    stopped = code.completions.create(model=builtin.model, prompt=PROMPT, stop="self", **GREEDY).choices[0]
    assert stopped.text == builtin.completion().partition("self")[0] and stopped.finish_reason == "stop"


def test_extra_body(code: openai.OpenAI, builtin: Server) -> None:
    """vLLM's fields through `extra_body`: `ignore_eos`, `min_tokens`, `top_k`, `return_token_ids`."""
    answer = code.completions.create(
        model=builtin.model, prompt=PROMPT, max_tokens=200, temperature=1.0,
        extra_body={"top_k": 1, "ignore_eos": True, "return_token_ids": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 200
    assert len(answer.choices[0].model_extra["token_ids"]) == 200
    assert answer.choices[0].text.startswith(builtin.completion())
    longer = code.completions.create(model=builtin.model, prompt=PROMPT, max_tokens=100, temperature=0,
                                     extra_body={"min_tokens": 90})
    assert longer.usage is not None and longer.usage.completion_tokens >= 90


def test_errors(code: openai.OpenAI, builtin: Server) -> None:
    """Errors have the client's own types, with status, `code` and `param`."""
    with pytest.raises(openai.BadRequestError) as bad:
        code.completions.create(model=builtin.model, prompt=PROMPT, temperature=-1)
    assert (bad.value.status_code, bad.value.param) == (400, "temperature")
    with pytest.raises(openai.BadRequestError) as long:
        code.completions.create(model=builtin.model, prompt="x " * 4096, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        code.completions.create(model="gpt-4", prompt=PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        code.models.retrieve("gpt-4")


def test_keys(chat: Server) -> None:
    """A wrong key is an `AuthenticationError`."""
    stranger = openai.OpenAI(base_url=chat.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model=chat.model, messages=MESSAGES)


def test_request_ids(talk: openai.OpenAI, chat: Server) -> None:
    """The request's id is in `_request_id`, and in the response's header."""
    raw = talk.chat.completions.with_raw_response.create(
        model=chat.model, messages=MESSAGES, extra_headers={"X-Request-Id": "mine-1"}, **GREEDY)
    assert raw.headers["x-request-id"] == "mine-1" == raw.parse()._request_id


def test_leaving_a_stream(code: openai.OpenAI, builtin: Server) -> None:
    """A stream that is closed early ends its request on the server."""
    stream = code.completions.create(
        model=builtin.model, prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    for _ in range(1200):
        if builtin.http.get("/health").json()["num_live"] == 0:
            return
        asyncio.run(asyncio.sleep(0.05))
    raise AssertionError("the request still runs")


@pytest.fixture(scope="module")
def caller(scripted: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted.base_url, api_key=scripted.key, max_retries=0)


ARGUMENTS = '{"city": "Paris"}'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CALLING = {"model": "scripted", "tools": [WEATHER], "messages": [{"role": "user", "content": "Rain? #weather"}]}


def test_tool_calls(caller: openai.OpenAI) -> None:
    """A tool is called (`tools`), and its result answered."""
    choice = caller.chat.completions.create(**CALLING).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look it up."
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
    turns = [*CALLING["messages"], choice.message, {"role": "tool", "tool_call_id": call.id, "content": "#sunny"}]
    assert caller.chat.completions.create(**CALLING | {"messages": turns}).choices[0].message.content == "It is sunny."


def test_tool_calls_streamed(caller: openai.OpenAI) -> None:
    """A tool call as a stream, put together by `chat.completions.stream`."""
    with caller.chat.completions.stream(**CALLING) as stream:
        grown = [event.arguments for event in stream if event.type == "tool_calls.function.arguments.delta"]
        choice = stream.get_final_completion().choices[0]
    assert grown[-1] == ARGUMENTS and grown == sorted(grown, key=len)
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.arguments == ARGUMENTS


def test_reasoning(caller: openai.OpenAI) -> None:
    """Reasoning stands next to the answer (`reasoning_content`), whole and streamed."""
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "Where? #reason"}]}
    message = caller.chat.completions.create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("Where is Paris?", "In France.")
    deltas = [chunk.choices[0].delta for chunk in caller.chat.completions.create(stream=True, **asked)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Where is Paris?"
    assert "".join(delta.content or "" for delta in deltas) == "In France."


def test_structured_output(talk: openai.OpenAI, chat: Server) -> None:
    """Structured output: `response_format` with a JSON schema, and the helper `parse`."""
    class Answer(pydantic.BaseModel):
        number: int = pydantic.Field(ge=1, le=9)

    answer = talk.chat.completions.parse(model=chat.model, messages=MESSAGES, response_format=Answer, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_tools_of_a_template_that_has_none(talk: openai.OpenAI, chat: Server) -> None:
    """Offers tools to a model whose template has none (`tools`): the system prompt describes them."""
    answer = talk.chat.completions.create(
        model=chat.model, messages=MESSAGES, tools=[WEATHER], max_tokens=MAX_TOKENS, temperature=0)
    assert answer.choices[0].message.content == chat.chat(tools=[WEATHER]) != chat.chat()


@pytest.mark.parametrize(("asks", "fields"), [
    ("audio (`modalities`)", {"modalities": ["text", "audio"]}),
], ids=["audio"])
def test_refused_fields(
    talk: openai.OpenAI, chat: Server, asks: str, fields: dict[str, Any], record_property: Refused,
) -> None:
    """Asks for {asks}."""
    with pytest.raises(openai.BadRequestError) as refused:
        talk.chat.completions.create(model=chat.model, messages=MESSAGES, **fields)
    assert refused.value.code == "unsupported_parameter" and refused.value.param in fields
    record_property("refused", refused.value.body["message"])


def test_embeddings(talk: openai.OpenAI, chat: Server) -> None:
    """Embeds texts and token ids, as floats, in base64 and with fewer `dimensions`."""
    texts = [PROMPT, "def is_empty(self):"]
    ids = [chat.post("/tokenize", prompt=text)["tokens"] for text in texts]
    expected = [one["embedding"] for one in chat.post("/v1/embeddings", input=texts)["data"]]
    for given, options in ((texts, {}), (ids, {"encoding_format": "base64"}), (texts, {"encoding_format": "float"})):
        answer = talk.embeddings.create(model=chat.model, input=given, **options)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        if options.get("encoding_format") != "base64":
            for one, wanted in zip(answer.data, expected, strict=True):
                assert one.embedding == pytest.approx(wanted, abs=1e-6)
    (short,) = talk.embeddings.create(model=chat.model, input=PROMPT, dimensions=8).data
    assert len(short.embedding) == 8 and sum(number**2 for number in short.embedding) == pytest.approx(1, abs=1e-3)


def test_responses(talk: openai.OpenAI, chat: Server) -> None:
    """Creates a response, continues it by `previous_response_id`, fetches and deletes it."""
    first = talk.responses.create(
        model=chat.model, input=MESSAGES[1:], instructions=MESSAGES[0]["content"], max_output_tokens=MAX_TOKENS,
        temperature=0)
    assert first.output_text == chat.chat() != ""
    assert first.usage is not None and first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    turns = [*MESSAGES[1:], {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And?"}]
    second = talk.responses.create(model=chat.model, input="And?", previous_response_id=first.id, temperature=0,
                                   max_output_tokens=MAX_TOKENS)
    assert second.output_text == chat.chat(turns)
    assert talk.responses.retrieve(first.id).output_text == first.output_text
    talk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        talk.responses.retrieve(first.id)


def test_responses_stream(talk: openai.OpenAI, chat: Server) -> None:
    """Streams a response: `responses.stream`, with the events that build its items."""
    with talk.responses.stream(model=chat.model, input=MESSAGES, max_output_tokens=MAX_TOKENS, temperature=0) as stream:
        events = list(stream)
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == events[-1].response.output_text == chat.chat()
    assert events[0].type == "response.created" and events[-1].response.usage is not None


def test_responses_parse(talk: openai.OpenAI, chat: Server) -> None:
    """Parses a response into a pydantic model: `responses.parse`."""
    response = talk.responses.parse(model=chat.model, input=MESSAGES, text_format=Answer, max_output_tokens=200)
    assert isinstance(response.output_parsed, Answer)
