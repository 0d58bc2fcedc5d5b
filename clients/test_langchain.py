"""LangChain's chat model and language model for OpenAI's interface."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Literal

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from servers import MAX_TOKENS, MESSAGES, PROMPT, Server

CLIENT = "`langchain-openai`"
VERSION = version("langchain-openai")
SETTING = ("`ChatOpenAI(base_url=\"http://127.0.0.1:8000/v1\", api_key=...)`; vLLM's fields go into "
           "`extra_body`.")
KINDS = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
CONVERSATION = [KINDS[turn["role"]](turn["content"]) for turn in MESSAGES]


class Answer(BaseModel):
    """What is asked for as structured output."""

    text: str


class Person(BaseModel):
    """A person who is described."""

    name: str
    age: int


class Part(BaseModel):
    """A part of a server, of one of two kinds."""

    kind: Literal["slot", "block"]


@pytest.fixture(scope="module")
def talk(chat: Server) -> ChatOpenAI:
    return ChatOpenAI(base_url=chat.base_url, api_key=chat.key, model=chat.model, temperature=0,
                      max_tokens=MAX_TOKENS, max_retries=0)


@pytest.fixture(scope="module")
def code(builtin: Server) -> OpenAI:
    return OpenAI(base_url=builtin.base_url, api_key=builtin.key, model=builtin.model, temperature=0,
                  max_tokens=MAX_TOKENS, max_retries=0)


def test_invoke(talk: ChatOpenAI, chat: Server) -> None:
    """`ChatOpenAI.invoke` answers a conversation and has the token counts."""
    answer = talk.invoke(CONVERSATION)
    assert answer.content == chat.chat() and answer.usage_metadata["output_tokens"] > 0


def test_stream(talk: ChatOpenAI, chat: Server) -> None:
    """`ChatOpenAI.stream` answers in pieces, with the token counts."""
    pieces = list(talk.stream(CONVERSATION, stream_usage=True))
    assert "".join(piece.content for piece in pieces) == chat.chat()
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0


def test_batch(talk: ChatOpenAI, chat: Server) -> None:
    """`ChatOpenAI.batch` answers eight conversations at once."""
    assert [answer.content for answer in talk.batch([CONVERSATION] * 8)] == [chat.chat()] * 8


def test_async(talk: ChatOpenAI, chat: Server) -> None:
    """`ChatOpenAI.ainvoke` and `astream`."""
    async def both() -> tuple[str, str]:
        streamed = "".join([piece.content async for piece in talk.astream(CONVERSATION)])
        return (await talk.ainvoke(CONVERSATION)).content, streamed

    assert asyncio.run(both()) == (chat.chat(), chat.chat())


def test_chain(talk: ChatOpenAI, chat: Server) -> None:
    """A chain of a prompt template and the chat model."""
    template = ChatPromptTemplate.from_messages([("system", "Answer in one line."), ("user", "What is a {thing}?")])
    expected = chat.chat([{"role": "system", "content": "Answer in one line."},
                          {"role": "user", "content": "What is a slot?"}])
    assert (template | talk).invoke({"thing": "slot"}).content == expected


def test_logprobs(talk: ChatOpenAI) -> None:
    """Log-probabilities, bound to the chat model."""
    answer = talk.bind(logprobs=True, top_logprobs=2).invoke(CONVERSATION)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.usage_metadata["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_completions(code: OpenAI, builtin: Server) -> None:
    """`OpenAI.invoke`, `stream` and `batch` complete prompts."""
    other = "def is_empty(self):"
    assert code.invoke(PROMPT) == "".join(code.stream(PROMPT)) == builtin.completion()
    assert code.batch([PROMPT, other]) == [builtin.completion(), builtin.completion(other)]


def test_extra_body(builtin: Server) -> None:
    """vLLM's fields through `extra_body`: `ignore_eos`, `top_k`."""
    code = OpenAI(base_url=builtin.base_url, api_key=builtin.key, model=builtin.model, temperature=1, max_tokens=200,
                  extra_body={"ignore_eos": True, "top_k": 1})
    (generation,) = code.generate([PROMPT]).generations
    assert generation[0].text.startswith(builtin.completion())
    assert generation[0].generation_info["finish_reason"] == "length"


@pytest.fixture(scope="module")
def caller(scripted: Server) -> ChatOpenAI:
    return ChatOpenAI(base_url=scripted.base_url, api_key=scripted.key, model=scripted.model, temperature=0,
                      max_retries=0)


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "#sunny" if city == "Paris" else "unknown"


def test_tools(caller: ChatOpenAI) -> None:
    """`bind_tools`: a tool is called, and its result answered."""
    bound, turns = caller.bind_tools([weather]), [HumanMessage("Rain? #weather")]
    answer = bound.invoke(turns)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Paris"})]
    assert bound.invoke([*turns, answer, weather.invoke(answer.tool_calls[0])]).content == "It is sunny."


def test_tools_streamed(caller: ChatOpenAI) -> None:
    """`bind_tools`: a call as a stream."""
    pieces = list(caller.bind_tools([weather]).stream("Rain? #weather"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}]


@pytest.mark.parametrize(("asks", "method", "key"), [
    ("the schema of a pydantic model (`json_schema`)", "json_schema", "#json"),
    ("a function that must be called (`function_calling`)", "function_calling", "#person"),
], ids=["json_schema", "function_calling"])
def test_structured_output(caller: ChatOpenAI, asks: str, method: str, key: str) -> None:
    """`with_structured_output` by {asks}, whole and as a stream."""
    asked = caller.with_structured_output(Person, method=method)
    assert asked.invoke(f"Who? {key}") == Person(name="Ada", age=36) == list(asked.stream(f"Who? {key}"))[-1]


def test_schema_is_enforced(chat: Server) -> None:
    """`with_structured_output`: random weights answer with what the schema allows."""
    talk = ChatOpenAI(base_url=chat.base_url, api_key=chat.key, model=chat.model, temperature=1, max_retries=0)
    assert talk.with_structured_output(Part, method="json_schema").invoke(CONVERSATION).kind in ("slot", "block")


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_too_long(builtin: Server, responses: bool) -> None:
    """A conversation that is too long is LangChain's `ContextOverflowError`, of chats and of streamed responses."""
    talk = ChatOpenAI(base_url=builtin.base_url, api_key=builtin.key, model=builtin.model, max_retries=0,
                      use_responses_api=responses)
    long = "x " * 4096
    for ask in (lambda: talk.invoke(long), lambda: list(talk.stream(long))):
        with pytest.raises(ContextOverflowError):
            ask()


def test_tools_of_a_template_that_has_none(talk: ChatOpenAI) -> None:
    """`bind_tools` with a model whose template has no tools: the system prompt describes them."""
    answer = talk.bind_tools([Person]).invoke(CONVERSATION)
    assert isinstance(answer.content, str)
    assert answer.usage_metadata["input_tokens"] > talk.invoke(CONVERSATION).usage_metadata["input_tokens"] + 100
