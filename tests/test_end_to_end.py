"""The built-in model behind a real server: curl, the openai client, 256 streams at once, clients that go away."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.live import Live, serving

from slotwise import LLM, SamplingParams

MODEL = "slotwise-builtin"
SIGNATURES = (
    "def is_empty(self):", "def read_lines(path):", "def __repr__(self):", "def close(self):", "def get(self, key):",
    "def parse_header(line):", "def add(a, b):", "def test_copy(self):", "def main():",
    "class Stack:\n    def pop(self):",
)
NUM_STREAMS = 256

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving("--dtype", "float32", log=tmp_path_factory.mktemp("serve") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live, openai: ModuleType) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def jobs() -> list[tuple[str, int]]:
    draw = random.Random(1)
    return [(draw.choice(SIGNATURES), draw.randint(1, 48)) for _ in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def offline() -> list[str]:
    llm = LLM(dtype="float32")
    params = [SamplingParams(temperature=0, max_tokens=length) for _, length in jobs()]
    outputs = llm.generate([prompt for prompt, _ in jobs()], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def metric(live: Live, name: str) -> float:
    lines = live.client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"slotwise:{name}{{"))


def until(holds, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


def test_a_streaming_curl(live: Live):
    body = {"model": MODEL, "prompt": SIGNATURES[0], "max_tokens": 16, "temperature": 0, "stream": True}
    run = subprocess.run(
        [shutil.which("curl") or pytest.skip("no curl on this machine"), "-sN", f"{live.url}/v1/completions",
         "-H", "Content-Type: application/json", "-d", json.dumps(body)],
        capture_output=True, text=True, timeout=120)
    lines = [line for line in run.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == LLM(dtype="float32").generate(
        SIGNATURES[0], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0].outputs[0].text
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_openai_client_streams_and_fetches_the_same(client):
    asked = {"model": MODEL, "prompt": "def close(self):", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed == whole.choices[0].text != ""
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_tokens_that_may_not_come(live: Live):
    """Words that are banned, and ids of which alone an output may consist."""
    asked = {"prompt": "def close(self):", "max_tokens": 24, "temperature": 0, "return_token_ids": True}

    def choice(**fields: Any) -> dict[str, Any]:
        response = live.client.post("/v1/completions", json=asked | fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    def tokens_of(text: str) -> list[int]:
        return live.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]

    plain = choice()
    texts = {token: live.client.post("/detokenize", json={"tokens": [token]}).json()["prompt"]
             for token in plain["token_ids"]}
    token = next(token for token, text in texts.items() if text.strip() and tokens_of(text) == [token])
    assert token not in choice(bad_words=[texts[token]])["token_ids"]
    ids = tokens_of(" self.close")
    allowed = choice(allowed_token_ids=ids)
    assert set(allowed["token_ids"]) <= set(ids) and allowed["finish_reason"] == "length"


def test_chat_completes_code(client):
    messages = [{"role": "user", "content": "def is_empty(self):"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
    completion = client.completions.create(
        model=MODEL, prompt="def is_empty(self):", max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == completion.choices[0].text
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == completion.choices[0].text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_256_streams_at_once_say_what_they_say_offline(live: Live, offline: list[str], openai: ModuleType):
    async def one(client: openai.AsyncOpenAI, prompt: str, length: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=length, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with httpx.AsyncClient(limits=limits, timeout=240) as http:
            client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, http_client=http)
            return await asyncio.gather(*[one(client, *job) for job in jobs()])

    assert asyncio.run(all_of_them()) == offline


def test_a_seed_gives_the_same_text_alone_and_in_company(client):
    asked = {"model": MODEL, "prompt": "def main():", "max_tokens": 32, "temperature": 1.0, "seed": 7}
    alone = client.completions.create(**asked).choices[0].text
    crowd = client.completions.create(**asked | {"prompt": ["def main():", *SIGNATURES]})
    assert crowd.choices[0].text == alone


def test_a_client_that_goes_away_frees_its_place(live: Live):
    body = {"model": MODEL, "prompt": "def main():", "max_tokens": 900, "temperature": 0, "stream": True,
            "ignore_eos": True}
    with live.client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: httpx closes the connection with the iterator
        assert next(lines).startswith("data: "), reply.status_code
        assert metric(live, "num_requests_running") == 1
    generated = metric(live, "generation_tokens_total")
    until(lambda: metric(live, "num_requests_running") == 0)
    until(lambda: metric(live, "kv_cache_usage_perc") == 0)
    assert metric(live, "generation_tokens_total") - generated < 800, "it ran to its end all the same"


BAD_INPUT = (
    ({"model": "gpt-9"}, 404, "gpt-9"),
    ({"prompt": "x = 1\n" * 5000}, 400, "1024"),
    ({"max_tokens": 5000}, 400, "1024"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"temperature": 1e9}, 400, "temperature"),
    ({"top_p": "high"}, 400, "top_p"),
    ({"prompt": [5, 10**6]}, 400, "between 0 and 4095"),
    ({"prompt": None}, 400, "prompt"),
)


def test_bad_input_is_told_apart_while_a_stream_goes_on(live: Live):
    body = {"model": MODEL, "prompt": "def main():", "max_tokens": 400, "temperature": 0, "stream": True,
            "ignore_eos": True}
    with live.client.stream("POST", "/v1/completions", json=body) as canary:
        lines = canary.iter_lines()
        next(lines)
        for change, status, says in BAD_INPUT:
            reply = live.client.post("/v1/completions", json=body | {"max_tokens": 4, "stream": False} | change)
            assert reply.status_code == status, change
            assert reply.json()["error"].keys() >= {"message", "type", "param", "code"}
            assert says in reply.json()["error"]["message"]
        assert list(filter(None, lines))[-1] == "data: [DONE]"


def test_malformed_json_is_a_clear_error(live: Live):
    reply = live.client.post("/v1/completions", content=b'{"model": ', headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and "JSON" in reply.json()["error"]["message"]


def test_headers_without_end_close_the_connection_and_nothing_else(live: Live):
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: ")
        with pytest.raises(OSError):
            for _ in range(64):
                connection.sendall(b"a" * (1 << 20))
            connection.recv(1)
            raise ConnectionError("closed without a word")
    assert live.client.get("/health").status_code == 200
    big = {"model": MODEL, "prompt": "x = 1\n" * 300_000}
    assert live.client.post("/v1/completions", json=big).status_code == 400, "a body may be larger than that"


def test_template_variables_with_any_name_are_harmless(live: Live):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "def main():"}], "max_tokens": 2,
            "chat_template_kwargs": {"request": 1, "self": 2, "num_bytes": 3}}
    assert live.client.post("/v1/chat/completions", json=body).status_code == 200


def test_sigterm_even_to_the_whole_group_lets_running_streams_finish(tmp_path):
    with serving("--dtype", "float32", log=tmp_path / "log") as server:
        body = {"model": MODEL, "prompt": "def main():", "max_tokens": 300, "temperature": 0, "stream": True,
                "ignore_eos": True, "stream_options": {"include_usage": True}}
        with server.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            subprocess.run(["kill", "-TERM", str(engine_of(server)), str(server.process.pid)], check=True)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and [line for line in rest if '"error"' in line] == []
        assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 300
        assert server.process.wait(120) == 0


@pytest.fixture(scope="module")
def watchful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that soon misses its engine."""
    log = tmp_path_factory.mktemp("watchful") / "log"
    with serving("--dtype", "float32", "--engine-timeout", "4", log=log) as server:
        yield server


def engine_of(server: Live) -> int:
    return int(subprocess.run(
        ["pgrep", "-P", str(server.process.pid), "-f", "slotwise.compose.engine_process"], capture_output=True,
        text=True, check=True).stdout)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_engine_ends_its_streams_and_the_next_one_says_the_same(watchful: Live, sent: signal.Signals):
    body = {"model": MODEL, "prompt": "def main():", "max_tokens": 32, "temperature": 0}
    before = watchful.client.post("/v1/completions", json=body).json()["choices"]
    engine = engine_of(watchful)
    long = body | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    with watchful.client.stream("POST", "/v1/completions", json=long) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(engine, sent)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and sum('"error"' in line for line in rest) == 1
    health = watchful.client.get("/health")
    assert health.status_code == 503 and health.headers["retry-after"]
    until(lambda: watchful.client.get("/health").status_code == 200)
    assert watchful.client.post("/v1/completions", json=body).json()["choices"] == before
    assert engine_of(watchful) != engine
