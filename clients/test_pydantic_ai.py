"""Pydantic AI's agents over OpenAI's interface."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from servers import Server

CLIENT = "`pydantic-ai`"
VERSION = version("pydantic-ai-slim")
SETTING = '`OpenAIProvider(base_url="http://127.0.0.1:8000/v1", api_key=...)`.'


@pytest.fixture
def model(scripted: Server) -> OpenAIChatModel:
    return OpenAIChatModel(scripted.model, provider=OpenAIProvider(base_url=scripted.base_url, api_key=scripted.key))


def weather(city: str) -> str:
    """The weather in a city."""
    return "#sunny" if city in ("Paris", "Rome") else "unknown"


def test_an_agent(model: OpenAIChatModel) -> None:
    """An agent calls a tool and answers with its result."""
    result = asyncio.run(Agent(model, tools=[weather]).run("Rain? #weather"))
    assert result.output == "It is sunny." and result.usage.tool_calls == 1


class Person(BaseModel):
    """A person who is described."""

    name: str
    age: int


def test_an_output_type(model: OpenAIChatModel) -> None:
    """An agent whose output is a pydantic model, by a schema (`NativeOutput`)."""
    assert asyncio.run(Agent(model, output_type=NativeOutput(Person)).run("Who? #json")).output.age == 36


def test_an_agent_that_streams(model: OpenAIChatModel) -> None:
    """An agent calls a tool whose arguments are strict, and streams its answer."""
    async def streamed() -> list[str]:
        async with Agent(model, tools=[weather]).run_stream("Rain? #rome") as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(streamed())
    assert "".join(pieces) == "It is sunny."
