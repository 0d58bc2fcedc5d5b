"""DSPy: an answer, predictions that fill fields by a schema, a tool that is called.

The server is declared with what it supports; `dspy.LM("openai/NAME", api_base=...)` works too, but assumes that a model
it does not know supports neither schemas nor tools.
"""

from __future__ import annotations

from typing import Any, Literal

import calls
import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

SERVER = calls.server()
RAN: list[str] = []

register_provider(ProviderDefinition.chat(AccessPolicy(provider="slotwise", base_url=SERVER.base_url),
                                          compat=OpenAIChatCompat()),
                  supports=ModelSupport(function_calling=True, response_schema=True))


def lm(provider: str = "slotwise", key: str = SERVER.key) -> dspy.LM:
    return dspy.LM(f"{provider}/{SERVER.model}", api_base=SERVER.base_url, api_key=key, temperature=0, max_tokens=200,
                   cache=False, num_retries=0)


class Question(dspy.Signature):
    """Answer in one sentence."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Place(dspy.Signature):
    """Say on which continent a city is."""

    city: str = dspy.InputField()
    continent: Literal["Europe", "Asia", "Africa"] = dspy.OutputField()


def weather(city: str) -> str:
    """The weather in a city."""
    RAN.append(city)
    return f"The weather in {city} is sunny, 18 degrees."


class Forecast(dspy.Signature):
    """Answer with the tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def answer() -> Any:
    return {provider: lm(provider)("What is the capital of Japan?")[0] for provider in ("openai", "slotwise")}


def predict() -> Any:
    with dspy.context(lm=lm(), adapter=dspy.JSONAdapter(), track_usage=True):
        result = dspy.Predict(Question)(question="What is the capital of Japan?")
        return {"answer": result.answer, "usage": list(result.get_lm_usage().values())}


def typed() -> Any:
    with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
        return dspy.Predict(Place)(city="Paris").continent


def tool() -> Any:
    """The model must call a tool: small ones seldom do so by themselves."""
    tools = [dspy.Tool(weather)]
    with dspy.context(lm=lm(), adapter=dspy.JSONAdapter()):
        result = dspy.Predict(Forecast, tool_choice="required")(question="What is the weather in Paris?", tools=tools)
    return {"results": [call.execute(functions=tools) for call in result.calls.tool_calls], "ran": RAN}


def wrong_key() -> Any:
    try:
        lm(key="wrong")("What is the capital of Japan?")
    except Exception as error:
        return str(error)


calls.run(answer, predict, typed, tool, wrong_key)
