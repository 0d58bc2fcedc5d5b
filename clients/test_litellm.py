"""LiteLLM, with the providers under which it is told of such a server."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import litellm
import pytest
from servers import MAX_TOKENS, MESSAGES, PROMPT, Server

CLIENT = "`litellm`"
VERSION = version("litellm")
SETTING = '`model="hosted_vllm/NAME"` or `"openai/NAME"`, and `api_base="http://127.0.0.1:8000/v1"`.'
CHATS = ("openai", "hosted_vllm")
COMPLETIONS = ("text-completion-openai", "hosted_vllm")


def asked(server: Server, provider: str, **more: Any) -> dict[str, Any]:
    return {"model": f"{provider}/{server.model}", "api_base": server.base_url, "api_key": server.key,
            "temperature": 0, "max_tokens": MAX_TOKENS, "max_retries": 0} | more


@pytest.mark.parametrize("provider", CHATS)
def test_chat(chat: Server, provider: str) -> None:
    """`completion` answers a conversation, as `{provider}/`."""
    answer = litellm.completion(messages=MESSAGES, **asked(chat, provider))
    assert answer.choices[0].message.content == chat.chat()
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


@pytest.mark.parametrize("provider", CHATS)
def test_chat_stream(chat: Server, provider: str) -> None:
    """`completion` with `stream` and the token counts, as `{provider}/`."""
    chunks = list(litellm.completion(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked(chat, provider)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == chat.chat()
    (usage,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usage.completion_tokens > 0


@pytest.mark.parametrize("provider", COMPLETIONS)
def test_text_completion(builtin: Server, provider: str) -> None:
    """`text_completion` completes a prompt, whole and as a stream, as `{provider}/`."""
    whole = litellm.text_completion(prompt=PROMPT, **asked(builtin, provider))
    assert whole.choices[0].text == builtin.completion()
    chunks = litellm.text_completion(prompt=PROMPT, stream=True, **asked(builtin, provider))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == builtin.completion()


def test_async(chat: Server) -> None:
    """`acompletion`: eight conversations at once."""
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*[
            litellm.acompletion(messages=MESSAGES, **asked(chat, "openai")) for _ in range(8)])

    answers = asyncio.run(all_of_them())
    assert [answer.choices[0].message.content for answer in answers] == [chat.chat()] * 8


def test_extra_fields(builtin: Server) -> None:
    """vLLM's fields in addition to OpenAI's: `top_k`, `ignore_eos`."""
    fields = asked(builtin, "hosted_vllm", max_tokens=200, temperature=1.0)
    answer = litellm.text_completion(prompt=PROMPT, extra_body={"top_k": 1, "ignore_eos": True}, **fields)
    assert answer.usage.completion_tokens == 200 and answer.choices[0].text.startswith(builtin.completion())


def test_errors(builtin: Server, chat: Server) -> None:
    """Errors become LiteLLM's types: a wrong key, an unknown model, a prompt that is too long."""
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=MESSAGES, **asked(chat, "openai", api_key="wrong"))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **asked(chat, "openai", model="openai/gpt-4"))
    long = [{"role": "user", "content": "x " * 4096}]
    for provider, url in (("openai", builtin.base_url), ("anthropic", builtin.url)):
        for messages, max_tokens in ((long, 1), (MESSAGES, 8192)):
            with pytest.raises(litellm.ContextWindowExceededError):
                litellm.completion(
                    messages=messages, **asked(builtin, provider, max_tokens=max_tokens, api_base=url, api_key="x"))


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]
RAIN = [{"role": "user", "content": "Rain? #weather"}]


@pytest.mark.parametrize("provider", CHATS)
def test_tool_calls(scripted: Server, provider: str) -> None:
    """A tool is called, whole and as a stream, as `{provider}/`."""
    more = asked(scripted, provider, max_tokens=200)
    (call,) = litellm.completion(messages=RAIN, tools=TOOLS, **more).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    chunks = list(litellm.completion(messages=RAIN, tools=TOOLS, stream=True, **more))
    (built,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (built.function.name, built.function.arguments) == ("weather", '{"city": "Paris"}')


def test_tools_of_a_template_that_has_none(chat: Server) -> None:
    """Offers tools to a model whose template has none (`tools`): the system prompt describes them."""
    answer = litellm.completion(messages=MESSAGES, tools=TOOLS, **asked(chat, "openai"))
    assert answer.choices[0].message.content == chat.chat(tools=TOOLS) != chat.chat()


@pytest.mark.parametrize("provider", ["hosted_vllm", "jina_ai", "cohere"])
def test_rerank(chat: Server, provider: str) -> None:
    """`rerank` returns the best documents, as `{provider}/`."""
    documents = ["def close(self):", "import os", "def read(path):"]
    base = chat.url if provider == "hosted_vllm" else f"{chat.url}/v{2 if provider == 'cohere' else 1}/rerank"
    answer = litellm.rerank(model=f"{provider}/{chat.model}", query="Close a file.", documents=documents, top_n=2,
                            api_base=base, api_key=chat.key)
    plain = chat.post("/v1/rerank", query="Close a file.", documents=documents, top_n=2)["results"]
    assert [(one["index"], one["relevance_score"]) for one in answer.results] == [
        (one["index"], one["relevance_score"]) for one in plain]


def test_embedding(builtin: Server) -> None:
    """`embedding` returns the vectors of two texts."""
    answer = litellm.embedding(model=f"openai/{builtin.model}", input=[PROMPT, "import os"], api_base=builtin.base_url,
                               api_key=builtin.key, encoding_format="float")
    exact = builtin.post("/v1/embeddings", input=[PROMPT, "import os"])["data"]
    assert [one["embedding"] for one in answer.data] == [one["embedding"] for one in exact]
