"""Hostile uses of a connection: chunks, pipelines, half-closed and broken ones, slow bytes, abandoned bodies."""

from __future__ import annotations

import random

from .exchanges import ANSWERED, ANYTHING, SETTLED, Action, Exchange
from .hostile_heads import BODY, head, post

STREAM = '{"prompt":[2],"max_tokens":60,"stream":true,"ignore_eos":true}'
CHUNKED = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
LEAVE = ("close", "reset")


def chunks(rng: random.Random) -> Exchange:
    """Invalid chunk sizes and framing."""
    size = f"{len(BODY):x}"
    body = rng.choice((
        f"zz\r\n{BODY}\r\n0\r\n\r\n", f"-1\r\n{BODY}\r\n0\r\n\r\n", f"ffffffffffffffff\r\n{BODY}",
        f"\r\n{BODY}\r\n0\r\n\r\n",
        f"0x{size}\r\n{BODY}\r\n0\r\n\r\n", f"{size} \r\n{BODY}\r\n0\r\n\r\n", f"{size}\n{BODY}\n0\n\n",
        f"{size}\r\n{BODY}0\r\n\r\n",
        f"{size}\r\n{BODY}\r\n", f"{size}\r\n{BODY}\r\n0\r\n", f"{size};{'a' * 200_000}\r\n{BODY}\r\n0\r\n\r\n",
        "0\r\n\r\n",
        f"{size};a=\"\x00\xff\"\r\n{BODY}\r\n0\r\n\r\n", f"{'0' * 5000}{size}\r\n{BODY}\r\n0\r\n\r\n",
        f"7fffffff\r\n{BODY}",
        f"{size}\r\n{BODY}\r\n0\r\nX-A: b\r\nContent-Length: 5\r\n\r\n",
        f"{size}\r\n{BODY}\r\n0\r\n" + "X-A: b\r\n" * 20_000 + "\r\n",
        f"1{'0' * 16}\r\n{BODY}", f"{size}\r\n{BODY}\r\n+0\r\n\r\n"))
    return Exchange("chunks", [["send", head("POST", "/v1/completions", CHUNKED) + body], ["pause", 0.05],
                               ["half_close"]])


def small_chunks(rng: random.Random) -> Exchange:
    """A valid body of one-byte chunks."""
    body = "".join(f"1\r\n{byte}\r\n" for byte in BODY)
    pieces: list[Action] = [["send", head("POST", "/v1/completions", CHUNKED)]]
    step = rng.choice((7, 50, 1000))
    text = body + "0\r\n" + rng.choice(("", "X-Trailer: y\r\n")) + "\r\n"
    for start in range(0, len(text), step):
        pieces += [["send", text[start:start + step]], ["pause", 0.005]]
    return Exchange("small chunks", pieces, ANSWERED)


def many_chunks(rng: random.Random) -> Exchange:
    """A body beyond the limit, in endless chunks."""
    return Exchange("many chunks", [
        ["send", head("POST", "/v1/completions", CHUNKED)], ["repeat", "400\r\n" + " " * 1024 + "\r\n",
                                                             rng.choice((64, 4500))],
        ["send", "0\r\n\r\n"]], ANSWERED)


def pipelines(rng: random.Random) -> Exchange:
    """Several complete requests at once, each with a response."""
    parts = [rng.choice((head(), post(), head(path="/v1/models"), head(path="/nowhere"), post("{}"), post(STREAM)))
             for _ in range(rng.choice((2, 3, 8, 30)))]
    return Exchange("pipeline", [["send", "".join(parts)]], ANSWERED, len(parts))


def pipelines_left(rng: random.Random) -> Exchange:
    """Several requests, and a disconnect before or during the responses."""
    parts = [rng.choice((head(), post(), post(STREAM))) for _ in range(rng.choice((2, 3, 20)))]
    return Exchange("pipeline, gone", [["send", post(STREAM) + "".join(parts)], ["pause", rng.uniform(0, 0.2)],
                                       [rng.choice(LEAVE)]], ANYTHING)


def half_closed(rng: random.Random) -> Exchange:
    """A complete request, then a half-closed connection; the response is still read."""
    text = rng.choice((post(), post(STREAM), head(), head(path="/metrics"), post("{}")))
    pause: list[Action] = [["pause", rng.uniform(0, 0.05)]] if rng.random() < 0.5 else []
    return Exchange("half-closed", [["send", text], *pause, ["half_close"]], ANSWERED)


def half_closed_bodies(rng: random.Random) -> Exchange:
    """The body ends before its announced length."""
    told = f"Content-Type: application/json\r\nContent-Length: {len(BODY) + 5}\r\n"
    text = head("POST", "/v1/completions", told) + BODY
    return Exchange("half-closed body", [["send", text], ["pause", rng.uniform(0, 0.1)], ["half_close"]], SETTLED)


def streams_left(rng: random.Random) -> Exchange:
    before: Action = rng.choice((["pause", rng.uniform(0, 0.3)], ["read", 0.5]))
    return Exchange("stream, gone", [["send", post(STREAM)], before, [rng.choice(LEAVE)]], ANYTHING)


def abandoned_bodies(rng: random.Random) -> Exchange:
    length = rng.choice((50, 5000, 4_000_000))
    text = head("POST", rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize")),
                f"Content-Type: application/json\r\nContent-Length: {length}\r\n")
    sent = '{"prompt": [' + "5," * rng.randrange(20)
    return Exchange("abandoned body", [["send", text + sent], ["pause", rng.uniform(0, 1.0)], [rng.choice(LEAVE)]],
                    ANYTHING)


def slow_bytes(rng: random.Random) -> Exchange:
    """A complete request in small parts, over a second at most."""
    text, actions = rng.choice((head(), post(), head(path="/v1/models"))), []
    step = rng.choice((1, 3, 10))
    for start in range(0, len(text), step):
        actions += [["send", text[start:start + step]], ["pause", 1.0 / len(text) * step]]
    return Exchange("slow bytes", actions, ANSWERED)


def body_for_get(rng: random.Random) -> Exchange:
    path = rng.choice(("/health", "/metrics", "/v1/models", "/nowhere", "/explain/x"))
    text = head("GET", path, f"Content-Length: {len(BODY)}\r\n") + BODY + head()
    return Exchange("body for GET", [["send", text]], ANSWERED, 2)


def too_long_and_more(rng: random.Random) -> Exchange:
    """A refused body that goes on arriving, and a request behind it."""
    length = rng.choice((5_000_000, 50_000_000))
    text = head("POST", "/v1/completions", f"Content-Type: application/json\r\nContent-Length: {length}\r\n")
    return Exchange("too long a body", [["send", text], ["repeat", " " * 1000, 300], ["pause", 0.1], ["half_close"]])


def idle_then_more(rng: random.Random) -> Exchange:
    """A connection that is reused after a pause."""
    return Exchange("used again", [["send", head()], ["pause", rng.uniform(0, 1.0)], ["send", post()],
                                   ["pause", rng.uniform(0, 0.5)], ["send", head(path="/version")]], ANSWERED, 3)


GENERATORS = (chunks, chunks, chunks, small_chunks, many_chunks, pipelines, pipelines, pipelines_left, pipelines_left,
              half_closed,
              half_closed_bodies, streams_left, streams_left, abandoned_bodies, slow_bytes, body_for_get,
              too_long_and_more, idle_then_more)
