"""LlamaIndex: completions, chats, streams, a tool, a pydantic program."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import calls
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import AuthenticationError
from pydantic import BaseModel

SERVER = calls.server()
QUESTION = [ChatMessage(role="user", content="What is the capital of Japan?")]
RAN: list[str] = []


def model(key: str = SERVER.key, **more: Any) -> OpenAILike:
    fields = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0, "max_tokens": 48}
    return OpenAILike(model=SERVER.model, api_base=SERVER.base_url, api_key=key, context_window=8192, max_retries=0,
                      **fields | more)


def weather(city: str) -> str:
    """The weather in a city."""
    RAN.append(city)
    return f"The weather in {city} is sunny, 18 degrees."


class Place(BaseModel):
    """Where a city is."""

    city: str
    continent: Literal["Europe", "Asia", "Africa"]


def chat() -> Any:
    response = model().chat(QUESTION)
    return {"text": response.message.content, "usage": response.raw.usage.model_dump()}


def chat_stream() -> Any:
    return [response.delta for response in model().stream_chat(QUESTION) if response.delta]


async def chats() -> Any:
    """Four conversations at once."""
    together = await asyncio.gather(*[model().achat(QUESTION) for _ in range(4)])
    return [response.message.content for response in together]


def completion() -> Any:
    text = model(is_chat_model=False, is_function_calling_model=False)
    return {"whole": text.complete("The capital of Japan is").text,
            "pieces": [response.delta for response in text.stream_complete("The capital of Japan is")]}


def tool() -> Any:
    """The model must call the tool: small ones seldom do so by themselves."""
    response = model().predict_and_call([FunctionTool.from_defaults(weather)], "What is the weather in Paris?",
                                        tool_required=True)
    return {"ran": RAN, "text": response.response}


def structured() -> Any:
    return model().as_structured_llm(Place).chat([ChatMessage(role="user", content="Where is Paris?")]).raw.model_dump()


def wrong_key() -> Any:
    try:
        model("wrong").chat(QUESTION)
    except AuthenticationError as error:
        return error.message


calls.run(chat, chat_stream, chats, completion, tool, structured, wrong_key)
