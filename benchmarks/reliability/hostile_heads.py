"""Hostile request lines, headers, lengths, methods and paths."""

from __future__ import annotations

import random

from .exchanges import ANSWERED, ANYTHING, BEGUN, HOST, SETTLED, Exchange

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


GENERATORS = (request_line, other_protocols, header_flood, odd_header, hosts, origins, content_lengths, methods,
              methods,
              unknown_methods, paths, paths, names, names, expectations, upgrades, old_versions, smuggled,
              abandoned_heads)
