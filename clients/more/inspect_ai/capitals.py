"""Tasks for Inspect: questions with known answers, a choice, and a tool that must be called."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import Tool, ToolFunction, tool

SYSTEM = "Answer in one sentence."
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Germany": "Berlin"}


@tool
def weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather in a city.

        Args:
            city: The name of the city.
        """
        return f"The weather in {city} is sunny, 18 degrees."

    return execute


@task
def capitals() -> Task:
    """Scores whether the answer has the capital's name."""
    samples = [Sample(f"Which city is the capital of {country}?", target=city) for country, city in CAPITALS.items()]
    return Task(dataset=samples, solver=[system_message(SYSTEM), generate()], scorer=includes(),
                config=GenerateConfig(max_tokens=48))


@task
def choices() -> Task:
    """Scores a choice among letters."""
    cities = list(CAPITALS.values())
    samples = [Sample(f"Which city is the capital of {country}?", choices=cities, target="ABCD"[cities.index(city)])
               for country, city in CAPITALS.items()]
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice(), config=GenerateConfig(max_tokens=48))


@task
def forecast() -> Task:
    """The model must call the tool, for small ones seldom do so by themselves."""
    sample = Sample([ChatMessageUser(content="What is the weather in Paris?")], target="sunny")
    return Task(dataset=[sample], solver=[use_tools(weather(), tool_choice=ToolFunction("weather")), generate()],
                scorer=includes(), config=GenerateConfig(max_tokens=48))
