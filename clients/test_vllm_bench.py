"""`vllm bench serve`: the requests of its backends `openai` and `openai-chat`, and its reading of the streams.

vLLM itself is not installed: these are the bodies that vllm/benchmarks/lib/endpoint_request_func.py sends.
"""

from __future__ import annotations

import json
from typing import Any

import sse
from servers import MAX_TOKENS, PROMPT, Server

CLIENT = "`vllm bench serve`"
VERSION = "replayed"
SETTING = "`--base-url http://127.0.0.1:8000` ([the command](#benchmark-a-server))."


def streamed(server: Server, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    with server.http.stream("POST", path, json={"model": server.model} | body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        *chunks, last = sse.events(response.iter_raw())
    assert last == sse.DONE
    return [json.loads(chunk) for chunk in chunks]


def usage(chunks: list[dict[str, Any]]) -> dict[str, int]:
    """The counts as the benchmark reads them: of chunks without choices alone."""
    (found,) = [chunk["usage"] for chunk in chunks if not chunk["choices"] and chunk.get("usage")]
    return found


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": MAX_TOKENS, "logprobs": None, "stream": True,
            "stream_options": {"include_usage": True}} | more


def conversation(**more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": PROMPT}]
    return {"messages": [{"role": "user", "content": content}], "max_completion_tokens": MAX_TOKENS, "stream": True,
            "stream_options": {"include_usage": True}} | more


def test_model(builtin: Server) -> None:
    """Without `--model`: the first of `/v1/models`, whose `root` has the tokenizer."""
    from transformers import AutoTokenizer

    first = builtin.http.get("/v1/models").json()["data"][0]
    assert first["id"] == builtin.model
    assert AutoTokenizer.from_pretrained(first["root"])(PROMPT).input_ids[-3:] == \
        builtin.post("/tokenize", prompt=PROMPT)["tokens"][-3:]


def test_completions(builtin: Server) -> None:
    """`--backend openai`: a stream of chunks that each have text, then the counts."""
    chunks = streamed(builtin, "/v1/completions", completion(temperature=0.0))
    texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]]
    assert "".join(texts) == builtin.completion()
    assert usage(chunks)["completion_tokens"] >= len(texts) > 0


def test_ignore_eos(builtin: Server) -> None:
    """`--ignore-eos` with sampling options: exactly the tokens asked for, in as many chunks."""
    chunks = streamed(builtin, "/v1/completions", completion(
        max_tokens=64, ignore_eos=True, temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, frequency_penalty=0.1,
        presence_penalty=0.1), **{"x-request-id": "bench-1"})
    assert usage(chunks)["completion_tokens"] == 64
    assert sum(bool(chunk["choices"]) for chunk in chunks) <= 64
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


def test_chats(chat: Server) -> None:
    """`--backend openai-chat`: the prompt as a part of type `text`, `max_completion_tokens`."""
    chunks = streamed(chat, "/v1/chat/completions", conversation(temperature=0.0))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == chat.chat([{"role": "user", "content": PROMPT}])
    assert usage(chunks)["completion_tokens"] > 0


def test_token_ids(builtin: Server) -> None:
    """Prompts as token ids, and the counts of the prompt are theirs."""
    ids = builtin.post("/tokenize", prompt=PROMPT)["tokens"]
    chunks = streamed(builtin, "/v1/completions", completion(prompt=ids, temperature=0.0))
    assert usage(chunks)["prompt_tokens"] == len(ids)
