"""smolagents: a model's answer and stream, and an agent that calls tools."""

from __future__ import annotations

from typing import Any

import calls
from openai import AuthenticationError
from smolagents import ChatMessage, OpenAIModel, ToolCallingAgent, tool

SERVER = calls.server()
QUESTION = [ChatMessage(role="user", content="What is the capital of Japan?")]
RAN: list[str] = []


def model(key: str = SERVER.key) -> OpenAIModel:
    return OpenAIModel(SERVER.model, api_base=SERVER.base_url, api_key=key, client_kwargs={"max_retries": 0},
                       temperature=0, max_tokens=48)


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    RAN.append(city)
    return f"The weather in {city} is sunny, 18 degrees."


def whole() -> Any:
    message = model().generate(QUESTION)
    return {"text": message.content, "input": message.token_usage.input_tokens,
            "output": message.token_usage.output_tokens}


def stream() -> Any:
    deltas = list(model().generate_stream(QUESTION))
    usage = next(delta.token_usage for delta in reversed(deltas) if delta.token_usage)
    return {"pieces": [delta.content for delta in deltas if delta.content], "input": usage.input_tokens,
            "output": usage.output_tokens}


def agent() -> Any:
    """The agent requires a call in each step (`tool_choice` is `required`); after two steps it must answer."""
    agent = ToolCallingAgent(tools=[weather], model=model(), max_steps=2, verbosity_level=0)
    result = agent.run("What is the weather in Paris?", return_full_result=True)
    called = [call for step in result.steps for call in step.get("tool_calls") or []]
    return {"ran": RAN, "output": str(result.output), "called": called, "input": result.token_usage.input_tokens}


def wrong_key() -> Any:
    try:
        model("wrong").generate(QUESTION)
    except AuthenticationError as error:
        return error.message


calls.run(whole, stream, agent, wrong_key)
