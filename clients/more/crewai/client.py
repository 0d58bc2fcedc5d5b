"""CrewAI: a model's answer, a crew with a task, a crew whose agent calls a tool."""

from __future__ import annotations

from typing import Any

import calls
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

SERVER = calls.server()
RAN: list[str] = []


def llm(key: str = SERVER.key, **more: Any) -> LLM:
    return LLM(model=f"openai/{SERVER.model}", base_url=SERVER.base_url, api_key=key, temperature=0, max_tokens=64,
               max_retries=0, **more)


@tool("weather", result_as_answer=True)
def weather(city: str) -> str:
    """The weather in a city."""
    RAN.append(city)
    return f"The weather in {city} is sunny, 18 degrees."


def crew(description: str, llm: LLM, tools: list[Any]) -> Any:
    agent = Agent(role="guide", goal="Answer briefly", backstory="You know the world.", llm=llm, tools=tools,
                  max_iter=2)
    task = Task(description=description, expected_output="One sentence.", agent=agent)
    return Crew(agents=[agent], tasks=[task]).kickoff()


def whole() -> Any:
    return llm().call("What is the capital of Japan?")


def task() -> Any:
    result = crew("What is the capital of Japan?", llm(), [])
    return {"text": result.raw, "usage": result.token_usage.model_dump()}


def agent() -> Any:
    """The model must call a tool: small ones seldom do so by themselves, and CrewAI leaves them the choice."""
    must = {"extra_body": {"tool_choice": "required"}}
    result = crew("What is the weather in Paris?", llm(additional_params=must), [weather])
    return {"ran": RAN, "text": result.raw}


def wrong_key() -> Any:
    try:
        llm("wrong").call("What is the capital of Japan?")
    except Exception as error:
        return str(error)


calls.run(whole, task, agent, wrong_key)
