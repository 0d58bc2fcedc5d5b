"""Bodies that are packed with gzip: what they unpack to is bounded as if it had been sent."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib

import httpx
import pytest
from api.test_bodies import LARGEST, MB, memory
from support.live_server import JSON, Server, eventually

from slotwise.api.http.api_errors import ApiError
from slotwise.api.http.http_exchange import STEP
from slotwise.api.limits import bodies
from slotwise.api.limits.bodies import unpacked

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [2, 3], "max_tokens": 2}


def sent(server: Server, content: bytes, encoding: str = "gzip", path: str = COMPLETIONS,
         method: str = "POST") -> httpx.Response:
    return server.client.request(
        method, server.url + path, content=content, headers=JSON | {"Content-Encoding": encoding})


def packed(body: object) -> bytes:
    return gzip.compress(json.dumps(body).encode(), mtime=0)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "x-gzip", "gzip ,", "identity, gzip"])
def test_a_packed_body_is_answered_as_the_body_itself(server: Server, encoding: str) -> None:
    answer = sent(server, packed(BODY), encoding)
    assert answer.status_code == 200, answer.text
    plain = server.post(COMPLETIONS, BODY)
    assert answer.json()["choices"] == plain.json()["choices"] and answer.json()["usage"] == plain.json()["usage"]


def test_every_route_with_a_body_unpacks_it(server: Server) -> None:
    for path, body in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 1}),
                       ("/tokenize", {"prompt": "fox"}), ("/detokenize", {"tokens": [2]}),
                       ("/abort_requests", {"request_ids": ["x"]})):
        assert sent(server, packed(body), path=path).status_code == 200
    assert sent(server, packed({}), path="/admin/scheduling", method="PUT").status_code == 200


def test_it_need_not_have_a_length(server: Server) -> None:
    content = packed(BODY)
    answer = server.client.post(server.url + COMPLETIONS, content=(content[i:i + 7] for i in range(0, len(content), 7)),
                                headers=JSON | {"Content-Encoding": "gzip"})
    assert answer.status_code == 200


@pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "compress", "gzip, gzip", "gzip;q=1", "x"])
def test_other_encodings_are_refused(server: Server, encoding: str) -> None:
    refused = sent(server, packed(BODY), encoding)
    error = refused.json()["error"]
    assert refused.status_code == 415 and error["code"] == "encoding_not_supported"
    assert error["param"] == "Content-Encoding" and refused.headers["accept-encoding"] == "gzip"
    assert sent(server, json.dumps(BODY).encode(), "identity").status_code == 200


WHOLE = packed(BODY)


@pytest.mark.parametrize(("content", "told"), [
    (json.dumps(BODY).encode(), "incorrect header check"), (WHOLE[:-9], "it ends too early"), (WHOLE[:5], "too early"),
    (WHOLE + b"x", "something follows its end"), (WHOLE * 2, "something follows its end"),
    (WHOLE[:-8] + bytes(8), "incorrect data check"), (zlib.compress(b"{}"), "incorrect header check"),
    (b"\x1f\x8b\x08" + b"\xff" * 40, "")], ids=range(8))
def test_what_is_no_gzip_is_a_bad_request(server: Server, content: bytes, told: str) -> None:
    refused = sent(server, content)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "malformed_gzip"
    assert told in refused.json()["error"]["message"]


def test_what_is_unpacked_must_be_what_could_be_sent(server: Server) -> None:
    assert sent(server, gzip.compress(b"{")).json()["error"]["code"] == "malformed_json"
    assert sent(server, b"").status_code == 400, "nothing is no gzip"
    largest = json.dumps(BODY | {"unknown": ""}).encode()
    full = largest.replace(b'""', b'"%b"' % (b"x" * (LARGEST - len(largest))))
    assert len(full) == LARGEST and sent(server, gzip.compress(full, 1)).status_code == 200
    refused = sent(server, gzip.compress(full + b" ", 1))
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "body_too_large"
    refused = sent(server, packed({"x": "x" * (1 << 20)}), path="/admin/scheduling", method="PUT")
    assert refused.status_code == 413, "a route with a smaller bound has it here too"


def test_a_bomb_takes_no_memory(server: Server) -> None:
    """A gigabyte in a megabyte, which is a thousand to one: the most that there can be."""
    squeeze = zlib.compressobj(9, wbits=31)
    bomb = b"".join([squeeze.compress(bytes(MB)) for _ in range(1024)]) + squeeze.flush()
    assert len(bomb) < 2 * MB
    server.post(COMPLETIONS, BODY)
    before = memory(server, "VmHWM")
    for _ in range(4):
        assert sent(server, bomb).status_code == 413
    assert memory(server, "VmHWM") < before + 8 * LARGEST
    eventually(lambda: server.get("/load").json()["server_load"] == 0)


def counted(content: bytes, most: int = LARGEST) -> tuple[bytes, list[int], int]:
    """What is unpacked, what was claimed, and the passes of the event loop meanwhile."""
    claims: list[int] = []

    async def run() -> tuple[bytes, int]:
        passes = 0

        async def count() -> None:
            nonlocal passes
            while True:
                passes += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        try:
            return await unpacked(content, most, claims.append), passes
        finally:
            counting.cancel()

    whole, passes = asyncio.run(run())
    return whole, claims, passes


def test_pieces_are_claimed_before_they_are_there_and_others_run_in_between() -> None:
    for body in (b"", b"x", b"x" * STEP, b"x" * (3 * STEP), random.Random(0).randbytes(5 * STEP + 17)):
        content = gzip.compress(body)
        whole, claims, passes = counted(content)
        assert whole == body and claims == sorted(claims)
        assert len(content) + len(body) <= claims[-1] <= len(content) + len(body) + STEP
        assert passes >= len(body) // STEP


def test_a_claim_that_is_refused_ends_it() -> None:
    def refuse(size: int) -> None:
        if size > 2 * STEP:
            raise ApiError(503, "full")

    with pytest.raises(ApiError, match="full"):
        asyncio.run(unpacked(gzip.compress(b"x" * LARGEST), LARGEST, refuse))
    assert bodies.SMALL < STEP, "a packed body counts, however small"
