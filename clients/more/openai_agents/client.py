"""OpenAI's agents SDK: an answer, a stream, a function tool, an output type, over responses and chat completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import calls
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import APIStatusError, AsyncOpenAI
from pydantic import BaseModel

SERVER = calls.server()
QUESTION = "What is the capital of Japan?"
MODELS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}

set_tracing_disabled(True)


def agent(kind: str, key: str = SERVER.key, tool_choice: str | None = None, **more: Any) -> Agent:
    """An agent of a model that is reached over `kind`, a key of MODELS."""
    client = AsyncOpenAI(base_url=SERVER.base_url, api_key=key, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=48, tool_choice=tool_choice, include_usage=True)
    return Agent(name="slotwise", instructions="Answer in one sentence.", model_settings=settings,
                 model=MODELS[kind](model=SERVER.model, openai_client=client), **more)


def used(result: Any) -> dict[str, int]:
    usage = result.context_wrapper.usage
    return {"requests": usage.requests, "input": usage.input_tokens, "output": usage.output_tokens}


async def whole() -> Any:
    told = {}
    for kind in MODELS:
        result = await Runner.run(agent(kind), QUESTION)
        told[kind] = {"text": result.final_output, "usage": used(result)}
    return told


async def stream() -> Any:
    told = {}
    for kind in MODELS:
        result = Runner.run_streamed(agent(kind), QUESTION)
        pieces = [event.data.delta async for event in result.stream_events()
                  if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]
        told[kind] = {"pieces": pieces, "text": result.final_output, "usage": used(result)}
    return told


def weather_that_tells(ran: list[str]) -> Callable[[str], str]:
    def weather(city: str) -> str:
        """The weather in a city."""
        ran.append(city)
        return f"The weather in {city} is sunny, 18 degrees."

    return weather


async def tool() -> Any:
    """The first turn must call the tool, for small models seldom do so by themselves; the second one answers."""
    told = {}
    for kind in MODELS:
        ran: list[str] = []
        weather = function_tool(weather_that_tells(ran))
        result = await Runner.run(agent(kind, tool_choice="weather", tools=[weather]), "What is the weather in Paris?")
        told[kind] = {"ran": ran, "text": result.final_output, "usage": used(result),
                      "items": [item.type for item in result.new_items]}
    return told


class Place(BaseModel):
    """Where a city is."""

    city: str
    continent: Literal["Europe", "Asia", "Africa"]


async def output_type() -> Any:
    return {kind: (await Runner.run(agent(kind, output_type=Place), "Where is Paris?")).final_output.model_dump()
            for kind in MODELS}


async def tool_and_output_type() -> Any:
    """Both are sent in the first turn, which must call the tool and is the last: the model would call it for ever."""
    told = {}
    for kind in MODELS:
        ran: list[str] = []
        guide = agent(kind, tool_choice="weather", tools=[function_tool(weather_that_tells(ran))], output_type=Place,
                      tool_use_behavior="stop_on_first_tool")
        result = await Runner.run(guide, "What is the weather in Paris?")
        told[kind] = {"ran": ran, "output": str(result.final_output)}
    return told


async def wrong_key() -> Any:
    told = {}
    for kind in MODELS:
        try:
            await Runner.run(agent(kind, key="wrong"), QUESTION)
        except APIStatusError as error:
            told[kind] = {"status": error.status_code, "message": error.message}
    return told


calls.run(whole, stream, tool, output_type, tool_and_output_type, wrong_key)
