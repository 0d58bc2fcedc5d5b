"""Haystack: a chat generator in a pipeline, a stream, an agent with a tool, structured output."""

from __future__ import annotations

from typing import Annotated, Any

import calls
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from openai import AuthenticationError

SERVER = calls.server()
QUESTION = "What is the capital of Japan?"
RAN: list[str] = []


def generator(key: str = SERVER.key, **kwargs: Any) -> OpenAIChatGenerator:
    """A generator whose requests have the further fields `kwargs`."""
    return OpenAIChatGenerator(api_key=Secret.from_token(key), model=SERVER.model, api_base_url=SERVER.base_url,
                               max_retries=0, generation_kwargs={"temperature": 0, "max_tokens": 48} | kwargs)


@tool
def weather(city: Annotated[str, "The name of the city."]) -> str:
    """The weather in a city."""
    RAN.append(city)
    return f"The weather in {city} is sunny, 18 degrees."


def pipeline() -> Any:
    """A template's variable is the question."""
    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("What is the capital of {{country}}?")]))
    pipeline.add_component("model", generator())
    pipeline.connect("prompt.prompt", "model.messages")
    (reply,) = pipeline.run({"prompt": {"country": "Japan"}})["model"]["replies"]
    return {"text": reply.text, "usage": reply.meta["usage"], "finish": reply.meta["finish_reason"]}


def stream() -> Any:
    pieces: list[str] = []
    (reply,) = generator().run([ChatMessage.from_user(QUESTION)],
                               streaming_callback=lambda chunk: pieces.append(chunk.content))["replies"]
    return {"pieces": [piece for piece in pieces if piece], "text": reply.text, "finish": reply.meta["finish_reason"]}


def agent() -> Any:
    """The model must call a tool, for small ones seldom do so by themselves, and the agent ends with the result."""
    agent = Agent(chat_generator=generator(tool_choice="required"), tools=[weather], exit_conditions=["weather"])
    messages = agent.run([ChatMessage.from_user("What is the weather in Paris?")])["messages"]
    return {"ran": RAN, "result": messages[-1].tool_call_result.result, "error": messages[-1].tool_call_result.error}


def structured() -> Any:
    schema = {"type": "object", "properties": {"continent": {"enum": ["Europe", "Asia", "Africa"]}},
              "required": ["continent"], "additionalProperties": False}
    shape = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}}
    (reply,) = generator(response_format=shape).run([ChatMessage.from_user("Where is Paris?")])["replies"]
    return reply.text


def wrong_key() -> Any:
    try:
        generator("wrong").run([ChatMessage.from_user(QUESTION)])
    except AuthenticationError as error:
        return error.message


calls.run(pipeline, stream, agent, structured, wrong_key)
