"""A seeded generator of hostile HTTP exchanges: the same seed gives the same ones.

usage: PYTHONPATH=.:tests python -m attacks.hostile URL [--seed N] [--count N] [--keep FILE]

plays a corpus against a server, prints violations, and appends their exchanges to FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attacks.exchanges import (
    ANSWERED,
    ANYTHING,
    BEGUN,
    HOST,
    LIMIT,
    SETTLED,
    Action,
    Exchange,
    Outcome,
    add_to_corpus,
    play,
)
from attacks.watch import Journal, Stderr

BODY = '{"prompt":[2],"max_tokens":1}'
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/slotwise-builtin", "/tokenize",
          "/detokenize", "/abort_requests", "/health", "/ping", "/version", "/openapi.json", "/metrics", "/load",
          "/admin/scheduling", "/timeline", "/events", "/explain/x", "/requests/x", "/", "/nowhere")
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND", "PURGE", "MKCOL", "LINK")
ODD = ("", " ", "\x00", "\x7f", "\xff", "\xc3\x28", "\t", "%", "%00", "\r", "\x1b[31m", "a" * 5000, "0", "-1", "é", "*",
       "../../etc/passwd", "${jndi:ldap://x}", "'\"<script>", ",", ";", "=")


def head(method: str = "GET", path: str = "/health", headers: str = "", host: str = f"Host: {HOST}\r\n") -> str:
    return f"{method} {path} HTTP/1.1\r\n{host}{headers}\r\n"


def post(body: str = BODY, headers: str = "", path: str = "/v1/completions") -> str:
    """Returns a complete request with the right length."""
    return head("POST", path, f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}") + body


def _send(name: str, text: str, expect: str = SETTLED, answers: int = 1) -> Exchange:
    return Exchange(name, [["send", text]], expect, answers)


def request_line(rng: random.Random) -> Exchange:
    """Odd request lines; the connection is half-closed, so that the server must settle even incomplete ones."""
    path = "/health"
    line = rng.choice((
        "GET", "GET ", "GET /health", "GET  /health  HTTP/1.1", f"get {path} HTTP/1.1", f"GET {path} HTTP/9.9",
        f"GET {path} HTTP/1.0", f"GET {path} HTTP/0.9", f"GET {path} HTTP/2.0", f"GET {path} http/1.1",
        f"GET {path} HTTP/1.1 more", f" GET {path} HTTP/1.1", f"G\x00T {path} HTTP/1.1", f"GET\t{path}\tHTTP/1.1",
        f"GET http://{HOST}{path} HTTP/1.1", "GET * HTTP/1.1", "OPTIONS * HTTP/1.1", f"CONNECT {HOST} HTTP/1.1",
        "CONNECT / HTTP/1.1", f"GET {path}\x00 HTTP/1.1", f"GET {path}\xff HTTP/1.1", "GET /\x80\x81 HTTP/1.1",
        f"GET {path}#x HTTP/1.1", "GET ?x HTTP/1.1", "GET health HTTP/1.1", f"GET //{HOST}{path} HTTP/1.1",
        f"GET {path} HTTP/1.1\r", f"GET {path} HTTP/11", f"GET {path} HTTP/1.1.1", f"GET {path} HTTP/-1.1",
        f"\r\n\r\nGET {path} HTTP/1.1", "M-SEARCH * HTTP/1.1", f"GET http://user:pw@evil.example:99999{path} HTTP/1.1",
        "GET http://[::1 HTTP/1.1", "A" * rng.choice((100, 10_000, 300_000)) + " / HTTP/1.1",
        f"GET /{'a' * rng.choice((1000, 70_000, 600_000))} HTTP/1.1"))
    return Exchange("request line", [["send", f"{line}\r\nHost: {HOST}\r\n\r\n"], ["half_close"]])


def other_protocols(rng: random.Random) -> Exchange:
    hello = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "".join(chr(rng.randrange(256)) for _ in range(300))
    told = rng.choice((
        hello, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "SSH-2.0-OpenSSH_9.6\r\n", "HELO x\r\n", "\x00" * 4096,
        "EHLO localhost\r\nMAIL FROM:<a@b>\r\n", "*1\r\n$4\r\nPING\r\n", "\x05\x01\x00", "USER x\r\n",
        "".join(chr(rng.randrange(256)) for _ in range(rng.randint(1, 3000)))))
    return Exchange("another protocol", [["send", told], ["half_close"]])


def header_flood(rng: random.Random) -> Exchange:
    number, size = rng.choice(((100, 10), (2000, 20), (20_000, 10), (1, 60_000), (1, 700_000), (60, 8000)))
    told = f"X-A: {'b' * size}\r\n"
    return Exchange("header flood", [["send", f"GET /health HTTP/1.1\r\nHost: {HOST}\r\n"], ["repeat", told, number],
                                     ["send", "\r\n"]])


def odd_header(rng: random.Random) -> Exchange:
    odd = rng.choice(ODD)
    told = rng.choice((f"X-A: {odd}", f"{odd}: x", odd, f"X-A : {odd}", f" folded{odd}", f"X-A:\r\n {odd}", ": x",
                       f"X-A\x00: {odd}", f"X-A: a\x00{odd}", f"X-A: a\nX-B: {odd}", f"X\xe9: {odd}"))
    return Exchange("odd header", [["send", head(headers=told + "\r\n")], ["half_close"]])


def hosts(rng: random.Random) -> Exchange:
    told = rng.choice((
        "", "Host:\r\n", "Host: evil.example\r\n", f"Host: {HOST}\r\nHost: evil.example\r\n",
        "Host: 127.0.0.1:99999\r\n",
        f"Host: {HOST}@evil.example\r\n", "Host: [::1\r\n", "Host: localhost.evil.example\r\n", "Host: \xff\r\n",
        f"Host: {'a' * 5000}\r\n", "Host: a b\r\n", "Host: 0\r\n", "Host: 2130706433\r\n", "Host: .\r\n",
        "X-Forwarded-Host: evil.example\r\n", f"host: {HOST}\r\nForwarded: for=\"[::1\r\n"))
    if rng.random() < 0.5:
        return _send("host", head(host=told))
    more = f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
    return _send("host", head("POST", "/v1/completions", more, told) + BODY)


def origins(rng: random.Random) -> Exchange:
    told = rng.choice(("null", "http://evil.example", f"http://{HOST}.evil.example", "file://", "", "http://", "\xff",
                       "a" * 9000, f"http://{HOST}", "http://localhost:1", "https://127.0.0.1"))
    if rng.random() < 0.3:
        preflight = f"Origin: {told}\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: *\r\n"
        return _send("origin", head("OPTIONS", "/v1/completions", preflight))
    return _send("origin", post(headers=f"Origin: {told}\r\nSec-Fetch-Site: cross-site\r\n"))


def content_lengths(rng: random.Random) -> Exchange:
    length = rng.choice((
        "-1", "+29", "0x1d", "29 29", "29, 29", "29,30", "1e3", "", " ", "9" * 19, "9" * 30, "9" * 5000,
        "18446744073709551615",
        "18446744073709551616", "9223372036854775808", "4294967297", "5000000", "\xb2\xb9", "29.0", "2_9", "029",
        "29;a", "29\x00"))
    told = f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
    if rng.random() < 0.4:
        told += f"Content-Length: {rng.choice(('29', '0', '28', length))}\r\n"
    return Exchange("content length", [["send", head("POST", "/v1/completions", told) + BODY], ["pause", 0.05],
                                       ["half_close"]])


def methods(rng: random.Random) -> Exchange:
    """Each method on each route, without a body."""
    method, path = rng.choice(METHODS), rng.choice(ROUTES)
    endless = path == "/events" and method == "GET"
    length = "" if method in ("GET", "HEAD", "OPTIONS") else "Content-Length: 0\r\n"
    return _send(f"{method} {path}", head(method, path, length), BEGUN if endless else ANSWERED)


def unknown_methods(rng: random.Random) -> Exchange:
    return Exchange("unknown method", [["send", head(rng.choice(("BREW", "get", "G" * 100, "FOO_BAR", "\xe9", "GET\x00",
                                                                 "1")),
                                                     rng.choice(ROUTES))], ["half_close"]])


def paths(rng: random.Random) -> Exchange:
    odd = rng.choice(("%2e", "%2e%2e", "%2f", "%00", "%ff", "%c0%ae", "%", "%2", "%zz", "..", ".", "//", ";a=b",
                      "%0d%0aX:y",
                      "%u0041", "%F0%9F%98%80", "%ed%a0%80", "+", "&", "a" * 4000, "%41" * 3000, "{}", "{x}", "\\",
                      "|"))
    base = rng.choice(("/health", "/v1/models/", "/explain/", "/requests/", "/", "//", "/v1/", "/v1//models",
                       "/timeline/",
                       "/health/", "/HEALTH", "/admin/", "/events?", "/metrics?name[]=", "/explain/cmpl-",
                       "/v1/models?"))
    path = rng.choice((base + odd, base + odd + "/" + odd, odd + base, base + "?" + odd, f"/{odd}/..{base}"))
    endless = path.startswith("/events?")
    expect = BEGUN if endless else ANSWERED if path.startswith("/") and "#" not in path else SETTLED
    return _send("path", head(path=path), expect)


def names(rng: random.Random) -> Exchange:
    """Headers that the application itself reads."""
    odd = rng.choice(ODD)
    name = rng.choice(("X-Request-Id", "traceparent", "tracestate", "Authorization", "Accept", "User-Agent", "Cookie",
                       "Content-Encoding", "Accept-Encoding", "Connection", "Upgrade", "Date", "Retry-After", "Range"))
    value = rng.choice((odd, f"Bearer {odd}", f"Basic {odd}", "Bearer", "bearer x", f"00-{'0' * 32}-{'0' * 16}-00",
                        f"00-{'g' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'1' * 16}-01-more", f"ff-{'1' * 32}",
                        "gzip, deflate",
                        "chunked", "x" * 100_000, "close, keep-alive", "x\x00y", "\xed\xa0\x80", odd * 3))
    times = rng.choice((1, 1, 2, 50))
    whole = post(headers=f"{name}: {value}\r\n" * times)
    return Exchange(f"header {name}", [["send", whole], ["pause", 0.02], ["half_close"]])


def expectations(rng: random.Random) -> Exchange:
    told = rng.choice(("100-continue", "100-Continue, 100-continue", "200-ok", "", "100-continue" * 100))
    text = head("POST", "/v1/completions", f"Expect: {told}\r\nContent-Type: application/json\r\nContent-Length: "
                f"{len(BODY)}\r\n")
    return Exchange("expect", [["send", text], ["pause", 0.1], ["send", BODY]])


def upgrades(rng: random.Random) -> Exchange:
    told = rng.choice((
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n",
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        "Connection: upgrade\r\nUpgrade: \r\n", "Upgrade: TLS/1.0\r\nConnection: Upgrade\r\n"))
    if rng.random() < 0.5:
        path = rng.choice(ROUTES[6:])  # /events continues for a half-closed client
        return Exchange("upgrade", [["send", head(path=path, headers=told)], ["half_close"]],
                        BEGUN if path == "/events" else SETTLED)
    return Exchange("upgrade", [["send", post(headers=told)], ["half_close"]])


def old_versions(rng: random.Random) -> Exchange:
    told = rng.choice(("GET /health HTTP/1.0\r\n\r\n", "GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
                       f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"
                       f"\r\n\r\n{BODY}", "GET /health\r\n\r\n", "GET /metrics HTTP/1.0\r\nHost: \r\n\r\n"))
    return Exchange("old version", [["send", told], ["half_close"]])


def smuggled(rng: random.Random) -> Exchange:
    """Content-Length beside Transfer-Encoding: two lengths for one body."""
    size = f"Content-Length: {rng.choice((0, 4, len(BODY), 1000))}\r\n"
    named = rng.choice(("chunked", "Chunked", "x, chunked", "chunked, identity", "xchunked", " chunked"))
    coding = f"Transfer-Encoding: {named}\r\n"
    both = rng.choice((size + coding, coding + size))
    body = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n" + rng.choice(("", head(), "GET /nowhere HTTP/1.1\r\nX: "))
    text = head("POST", "/v1/completions", f"Content-Type: application/json\r\n{both}") + body
    return Exchange("two lengths", [["send", text], ["pause", 0.05], ["half_close"]])


def abandoned_heads(rng: random.Random) -> Exchange:
    whole = head(headers="X-A: b\r\n" * 5)
    part = whole[:rng.randrange(1, len(whole))]
    return Exchange("abandoned head", [["send", part], ["pause", rng.uniform(0, 0.3)],
                                       [rng.choice(("close", "reset"))]],
                    ANYTHING)


HEADS = (request_line, other_protocols, header_flood, odd_header, hosts, origins, content_lengths, methods,
              methods,
              unknown_methods, paths, paths, names, names, expectations, upgrades, old_versions, smuggled,
              abandoned_heads)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_BODY = 4 << 20  # maximum bytes of a body
COMMON = ("model", "stream", "stream_options", "request_id", "service_tier", "priority", "ttft_ms", "tpot_ms", "user",
          "queue_timeout", "cache_salt", "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens",
          "stop",
          "stop_token_ids", "ignore_eos", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
          "logit_bias", "explain", "bench_output_tokens", "logprobs", "response_format", "prompt_logprobs",
          "guided_json")
FIELDS = {
    COMPLETIONS: (*COMMON, "prompt", "suffix", "echo", "best_of", "prompt_embeds"),
    CHAT: (*COMMON, "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt",
           "chat_template_kwargs",
           "tools", "tool_choice", "functions", "chat_template", "continue_final_message", "documents"),
    "/tokenize": ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs"),
    "/detokenize": ("model", "tokens"), "/abort_requests": ("request_ids", "request_id"),
    "/admin/scheduling": ("batching", "prefill", "tiers", "max_num_seqs", "max_num_batched_tokens", "max_stall_ms")}
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [2], "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}, "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [2]}, "/abort_requests": {"request_ids": ["x"]}, "/admin/scheduling": {}}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, "", "x", "1", "null", [], {}, [[]], [None], [True], [""], ["x"], [0], [-1],
    [[0]],
    [[""]], [1.5], {"": ""}, {"a": {"b": []}}, {"1": 1}, {"-1": 100}, {"x": 1}, {"1": None}, [{}], [[[]]],
    ["a", [], []],
    [5, "a"], [[5], "a"], [2**31], [2**63], [[2**64]], "\x00", "\U0001f600", "a" * 600, ["stop"] * 50, "\ud800", [4095],
    [10**6], {"include_usage": 1}, {"include_usage": True}, [{"role": "user"}], [{"role": 1, "content": "x"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "", "content": ""}],
    [{"role": "system", "content": "x"}], [{"role": "user", "content": {"a": 1}}], [{"content": "x"}])
NUMBERS = ("0", "-0", "0.0", "-0.0", "5e-324", "1e-308", "1e-38", "1e-39", "1.4e-45", "1e-7", "0.999999999999999999",
           "1.0000000000000002", "1e38", "3.5e38", "1e308", "1e309", "-1e309", "1e999", "NaN", "Infinity", "-Infinity",
           "nan",
           "2147483647", "2147483648", "-2147483649", "4294967296", "9007199254740993", "9223372036854775807",
           "9223372036854775808", "-9223372036854775809", "18446744073709551616", "1" * 400, "0x10", "01", "1.", ".5",
           "+1",
           "1e", "--1", "1_000", "1e-400", "0e99999", "0.1e-1000000")
NUMERIC = ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "presence_penalty",
           "frequency_penalty", "repetition_penalty", "priority", "ttft_ms", "tpot_ms", "queue_timeout", "logprobs",
           "best_of", "bench_output_tokens", "max_completion_tokens", "top_logprobs")


def request(path: str, body: str, content_type: str = "application/json") -> str:
    """Returns a complete request.  `body` is text of bytes."""
    method = "PUT" if path.startswith("/admin/") else "POST"
    return head(method, path, f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n") + body


def _asked(name: str, path: str, body: str) -> Exchange:
    return Exchange(name, [["send", request(path, body)]], ANSWERED)


def _latin(value: Any) -> str:
    """Returns JSON with surrogates escaped, as text of bytes."""
    return json.dumps(value)


def types(rng: random.Random) -> Exchange:
    path = rng.choice(list(FIELDS))
    body = dict(BASES[path])
    for name in rng.sample(FIELDS[path], min(len(FIELDS[path]), rng.choice((1, 1, 1, 2, 4)))):
        body[name] = rng.choice(VALUES)
    return _asked("types", path, _latin(body))


def numbers(rng: random.Random) -> Exchange:
    path = rng.choice((COMPLETIONS, CHAT))
    told = "".join(f',"{rng.choice(NUMERIC)}":{rng.choice(NUMBERS)}' for _ in range(rng.choice((1, 1, 2))))
    return _asked("numbers", path, _latin(BASES[path])[:-1] + told + "}")


def sampled(rng: random.Random) -> Exchange:
    """Extreme numbers in or near their range, combined with sampling, so that they reach the sampler."""
    tiny = ("5e-324", "1e-300", "1e-45", "1e-38", "1e-20", "1e-6", "0.01", "1e6", "1e30", "1e38", "1e300", "100")
    body = {"prompt": "def f(", "max_tokens": 4, "seed": rng.randrange(100)}
    told = "".join(f',"{name}":{rng.choice(tiny)}' for name in rng.sample(
        ("temperature", "repetition_penalty", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 2))
    if rng.random() < 0.4:
        told += f',"logit_bias":{{"{rng.randrange(5000)}":{rng.choice(("-100", "100", "1e300", "-1e300", "1e-300"))}}}'
    if rng.random() < 0.3:
        told += f',"logprobs":{rng.choice((0, 1, 5, 20))}'
    return _asked("sampling", COMPLETIONS, _latin(body)[:-1] + told + "}")


def encodings(rng: random.Random) -> Exchange:
    inside = rng.choice(("\xff", "\xc3\x28", "\xed\xa0\x80", "\xf8\x88\x80\x80\x80", "\x00", "\\u0000", "\\ud800",
                         "\\udfff\\ud800",
                         "\\ud83d", "\xf0\x9f\x98", "\x80" * 100, "\\x41", "\\u12", "\\", "\n", "\x1f",
                         "\\ud83d\\ude00",
                         "\xe2\x80\xa8", "\xef\xbf\xbf", "\xf4\x90\x80\x80"))
    form = rng.choice((
        '{"prompt":"%s","max_tokens":2}', '{"prompt":["%s"],"max_tokens":2}',
        '{"prompt":[2],"max_tokens":2,"stop":"%s"}',
        '{"prompt":[2],"max_tokens":2,"user":"%s"}', '{"prompt":[2],"model":"%s"}',
        '{"prompt":[2],"max_tokens":2,"%s":1}',
        '{"prompt":[2],"max_tokens":2,"request_id":"%s"}', '{"prompt":[2],"max_tokens":2,"cache_salt":"%s"}',
        '{"prompt":[2],"max_tokens":2,"note":"%s"}', '{"prompt":[2],"max_tokens":2,"stream":true,"stop":["%s"]}'))
    if rng.random() < 0.3:
        role = rng.choice(("user", inside))
        told = f'"role":"{role}","content":"{inside}","name":"{inside}"'
        return _asked("encoding", CHAT, f'{{"messages":[{{{told}}}],"max_tokens":2}}')
    return _asked("encoding", COMPLETIONS, form % inside)


def whole_encodings(rng: random.Random) -> Exchange:
    body = rng.choice((
        "\xef\xbb\xbf" + BODY, BODY.encode("utf-16").decode("latin-1"), BODY.encode("utf-32").decode("latin-1"),
        BODY + "\x00",
        BODY + BODY, BODY + "x", "\x00" + BODY, " " * 5000 + BODY, BODY + "\n" * 5000, "", " ", "null", "[]", "1",
        '"x"',
        "{", "{}", "{,}", '{"prompt":', "{'prompt':[2]}", "prompt=x&max_tokens=1", "\x1f\x8b\x08" + "\x00" * 30,
        '{"prompt":[2],"prompt":[2],"max_tokens":1,"max_tokens":2}', '{"prompt":[2],"max_tokens":1}//', "NaN",
        "\xff\xfe"))
    return _asked("whole body", COMPLETIONS, body)


def content_types(rng: random.Random) -> Exchange:
    kind = rng.choice(("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "\xff",
                       "application/json; charset=utf-16", "application/json;" * 500, "APPLICATION/JSON", "json", "*/*",
                       "application/json, text/plain", "application/vnd.api+json", "text/plain;application/json",
                       "a/b" * 900))
    return Exchange("content type", [["send", request(COMPLETIONS, BODY, kind)]], ANSWERED)


def depths(rng: random.Random) -> Exchange:
    deep = rng.choice((10, 100, 500, 900, 1100, 5000, 200_000))
    opens, closes = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"":', "}]")))
    inside = opens * deep + rng.choice(("", "1", '"x"')) + (closes * deep if rng.random() < 0.7 else "")
    form = rng.choice(('{"prompt":%s}', '{"prompt":[2],"max_tokens":1,"x":%s}', '{"prompt":[2],"logit_bias":%s}', "%s",
                       '{"prompt":["a",%s]}'))
    if rng.random() < 0.4:
        return _asked("depth", CHAT, rng.choice((
            '{"messages":%s}', '{"messages":[{"role":"user","content":%s}],"max_tokens":1}',
            '{"messages":[{"role":%s}]}',
            '{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":%s,"max_tokens":1}')) % inside)
    return _asked("depth", COMPLETIONS, form % inside)


def sizes(rng: random.Random) -> Exchange:
    """Large bodies of many small elements, within a mebibyte; sometimes one beyond the limit."""
    item = rng.choice(("[]", '""', "5", "[2]", '"a"', "{}", "null", "1e5", "[[]]", '"\\""', '"\\u0041"', "-1",
                       '"a",[]'))
    count = rng.choice((1000, 50_000, (1 << 20) // (len(item) + 1)))
    if rng.random() < 0.05:
        count = MAX_BODY // (len(item) + 1) + 10
    path, form = rng.choice((
        (COMPLETIONS, '{"prompt":[%s],"max_tokens":1}'), (COMPLETIONS, '{"prompt":["a",%s],"max_tokens":1}'),
        (COMPLETIONS, '{"prompt":[2],"max_tokens":1,"stop":[%s]}'),
        (COMPLETIONS, '{"prompt":[2],"x":[%s],"max_tokens":1}'),
        (COMPLETIONS, '{"prompt":[2],"max_tokens":1,"stop_token_ids":[%s]}'),
        (CHAT, '{"messages":[%s],"max_tokens":1}'),
        (CHAT, '{"messages":["",%s],"max_tokens":1}'),
        (CHAT, '{"messages":[{"role":"user","content":[%s]}],"max_tokens":1}'),
        ("/detokenize", '{"tokens":[%s]}'), ("/abort_requests", '{"request_ids":[%s]}'),
        ("/tokenize", '{"messages":[%s]}'),
        ("/admin/scheduling", '{"tiers":[%s]}')))
    before, _, after = form.partition("%s")
    size = len(before) + len(after) + count * (len(item) + 1) - 1
    method = "PUT" if path.startswith("/admin/") else "POST"
    begin = head(method, path, f"Content-Type: application/json\r\nContent-Length: {size}\r\n")
    return Exchange("size", [["send", begin + before], ["repeat", item + ",", count - 1], ["send", item + after]],
                    ANSWERED)


def long_texts(rng: random.Random) -> Exchange:
    piece = rng.choice(("x", "x y ", "\\u0041", "\\ud800", "\\n", " ", "0", "\\ud83d\\ude00", "\xc3\xa9", "\\u0000",
                        "_", "</s>",
                        "<|im_start|>"))
    count = rng.choice((2000, 100_000, (1 << 20) // len(piece)))
    path, before, after = rng.choice((
        (COMPLETIONS, '{"prompt":"', '","max_tokens":1}'), (COMPLETIONS, '{"prompt":[2],"stop":"', '","max_tokens":1}'),
        (CHAT, '{"messages":[{"role":"user","content":"', '"}],"max_tokens":1}'), ("/tokenize", '{"prompt":"', '"}'),
        (COMPLETIONS, '{"prompt":[2],"max_tokens":1,"user":"', '"}'), (COMPLETIONS, '{"prompt":[2],"model":"', '"}'),
        (COMPLETIONS, '{"prompt":[2],"max_tokens":1,"', '":1}'), (COMPLETIONS, '{"prompt":[2],"max_tokens":', "1}")))
    size = len(before) + len(after) + count * len(piece)
    begin = head("POST", path, f"Content-Type: application/json\r\nContent-Length: {size}\r\n")
    return Exchange("long text", [["send", begin + before], ["repeat", piece, count], ["send", after]], ANSWERED)


BODIES = (types, types, types, numbers, numbers, sampled, sampled, encodings, encodings, whole_encodings,
              content_types, depths, depths, sizes, sizes, long_texts)


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


CONNECTIONS = (chunks, chunks, chunks, small_chunks, many_chunks, pipelines, pipelines, pipelines_left, pipelines_left,
              half_closed,
              half_closed_bodies, streams_left, streams_left, abandoned_bodies, slow_bytes, body_for_get,
              too_long_and_more, idle_then_more)


Generator = Callable[[random.Random], Exchange]
GENERATORS: tuple[Generator, ...] = (
    *HEADS, *BODIES, *CONNECTIONS)
CORPUS = Path(__file__).with_name("corpus.jsonl")
AT_ONCE = 4
LATE = 0.1  # seconds that a traceback may take to reach its file
SOURCES = 8  # client addresses, different from those of legitimate clients


def exchange(seed: int, number: int) -> Exchange:
    """Returns exchange `number`; kinds take turns, so that every range has a few of each."""
    rng = random.Random(f"{seed}-{number}")
    return GENERATORS[number % len(GENERATORS)](rng)


def generate(seed: int, count: int) -> list[Exchange]:
    return [exchange(seed, number) for number in range(count)]


def source(number: int) -> str:
    """Returns a loopback address for exchange `number`."""
    return f"127.0.2.{1 + number % SOURCES}"


Bite = tuple[Exchange, str, Outcome]
"""With what is wrong."""


async def play_all(url: str, exchanges: Iterable[Exchange], at_once: int = AT_ONCE,
                   complaint: Callable[[], str] = str, limit: float = LIMIT) -> list[Bite]:
    """Plays exchanges, `at_once` at a time.  Returns those that broke a law.

    Args:
        limit: seconds within which the expectation of each must hold.
        complaint: returns another violation since its last call; useful with one exchange at a time.
    """
    found: list[Bite] = []
    numbered = enumerate(tqdm(list(exchanges), desc="    hostile", mininterval=5.0))

    async def work() -> None:
        for number, one in numbered:
            try:
                outcome = await play(url, one, source(number), limit)
                wrong = outcome.objection(one, limit) or complaint()
            except (OSError, TimeoutError) as error:
                outcome, wrong = Outcome(ended=time.perf_counter()), f"no connection: {type(error).__name__}: {error}"
            if wrong:
                found.append((one, wrong, outcome))

    await asyncio.gather(*(work() for _ in range(at_once)))
    return found


def _tracebacks(stderr: Stderr) -> Callable[[], str]:
    """Returns a function that returns the first traceback since its last call."""
    stderr.look()

    def latest() -> str:
        time.sleep(LATE)
        return next((str(line["exception"]).splitlines()[-1] for line in stderr.look() if "exception" in line), "")

    return latest


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile HTTP against a server.")
    parser.add_argument("url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--stderr", type=Path, help="file that takes the server's JSON lines: tracebacks bite, too; "
                        "exchanges are played one at a time")
    parser.add_argument("--keep", type=Path, help="file to which those that bite are added")
    asked = parser.parse_args()
    exchanges = generate(asked.seed, asked.count)
    if asked.stderr:
        bites = asyncio.run(play_all(asked.url, exchanges, 1, _tracebacks(Stderr(asked.stderr, Journal(asked.seed)))))
    else:
        bites = asyncio.run(play_all(asked.url, exchanges))
    for one, wrong, _ in bites:
        print(f"{one.name}: {wrong}\n    {one.as_line()[:300]}")
    print(f"{len(bites)} of {asked.count} bite")
    if asked.keep:
        print(f"{add_to_corpus(asked.keep, [one for one, _, _ in bites])} new ones kept in {asked.keep}")


if __name__ == "__main__":
    main()
