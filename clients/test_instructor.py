"""instructor: pydantic models as answers, over OpenAI's client."""

from __future__ import annotations

from importlib.metadata import version

import instructor
import openai
import pytest
from pydantic import BaseModel
from servers import Server

CLIENT = "`instructor`"
VERSION = version("instructor")
SETTING = "`instructor.from_openai` of a client of `openai`."


class Person(BaseModel):
    """A person who is described."""

    name: str
    age: int


def asked(scripted: Server, mode: instructor.Mode, key: str) -> Person:
    client = instructor.from_openai(openai.OpenAI(base_url=scripted.base_url, api_key=scripted.key), mode=mode)
    return client.chat.completions.create(
        model=scripted.model, response_model=Person, max_retries=0, messages=[
            {"role": "user", "content": f"Who? {key}"}])


@pytest.mark.parametrize(("asks", "mode", "key"), [
    ("a tool that must be called (`Mode.TOOLS`)", instructor.Mode.TOOLS, "#person"),
    ("a schema (`Mode.JSON_SCHEMA`)", instructor.Mode.JSON_SCHEMA, "#json"),
], ids=["tools", "schema"])
def test_a_model(scripted: Server, asks: str, mode: instructor.Mode, key: str) -> None:
    """A pydantic model by {asks}."""
    assert asked(scripted, mode, key).model_dump() == {"name": "Ada", "age": 36}
