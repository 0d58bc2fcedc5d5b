"""A client of a running server with OpenAI's API, this project's or another, that streams one answer at a time.

Ctrl-C may interrupt it anywhere: a stream that is left closes its connection, so the server stops generating.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
from collections.abc import Generator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from slotwise.errors import OneLineError, printable

CONNECT_SECONDS = 10.0
MOST_LINE = 1 << 22  # bytes of an event
MOST_BODY = 1 << 20  # bytes of a whole answer that is read, such as an error
KEY_VARIABLE = "SLOTWISE_API_KEY"

_SCHEME = re.compile(r"https?://", re.IGNORECASE)
_ADDRESS = re.compile(r"(localhost|[\w-]+(\.[\w-]+)+):\d{1,5}(/\S*)?", re.ASCII)


class ServerError(OneLineError):
    """A server cannot be reached, or refuses; the message is one line."""


def is_url(text: str) -> bool:
    """Whether `text` is a server's address: http://HOST:PORT, https://HOST, localhost:PORT or 127.0.0.1:PORT/v1."""
    return _SCHEME.match(text) is not None or _ADDRESS.fullmatch(text) is not None


def api_key_of(given: str) -> str:
    """Returns the key to send, that of the environment where none is `given`; "" for none."""
    return given or os.environ.get(KEY_VARIABLE, "").partition(",")[0].strip()


class Server:
    """A server with OpenAI's API.

    Args:
        url: its address, with or without /v1.
        api_key: to send as a bearer token; "" for none.

    Raises:
        ServerError: the address or the key is not valid.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        try:
            found = urlsplit(url if _SCHEME.match(url) else f"http://{url}")
            port = found.port
        except ValueError as error:
            raise ServerError(f"{url!r:.80} is not the URL of a server: {error}") from error
        if not found.hostname or found.query or found.fragment:
            raise ServerError(f"{url!r:.80} is not the URL of a server, such as http://127.0.0.1:8000")
        if found.username is not None or found.password is not None:
            raise ServerError("a URL holds no user or password: give a key with --api-key")
        self._host, self._port, self._is_encrypted = found.hostname, port, found.scheme.lower() == "https"
        path = found.path.rstrip("/")
        for route in ("/chat/completions", "/completions", "/models"):
            path = path.removesuffix(route)
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self.url = f"{found.scheme.lower()}://{found.netloc}{self._path.removesuffix('/v1')}"
        self._headers = {"Content-Type": "application/json", "User-Agent": "slotwise"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ServerError("the API key holds characters that cannot be sent")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[dict[str, Any]]:
        """Returns the models that it lists, each with an `id`.  Raises ServerError."""
        connection, response = self._ask("GET", "/models", None)
        try:
            said = _decoded(response.read(MOST_BODY))
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: {_why(error)}") from error
        finally:
            connection.close()
        listed = said.get("data") if isinstance(said, dict) else None
        return [one for one in listed or () if isinstance(one, dict) and isinstance(one.get("id"), str)]

    def first_model(self) -> dict[str, Any]:
        """Returns the first model that it lists.  Raises ServerError."""
        listed = self.models()
        if not listed:
            raise ServerError(f"{self.url} lists no model: name one with --model")
        return listed[0]

    def stream(self, route: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Yields the events of a streamed answer.

        Args:
            route: behind /v1.

        Raises:
            ServerError: the server refuses, or the stream breaks off.
        """
        connection, response = self._ask("POST", route, {**body, "stream": True})
        try:
            while line := response.readline(MOST_LINE):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _decoded(data)
                if not isinstance(event, dict):
                    raise ServerError(f"{self.url}: an event that is not JSON: {data[:80].decode(errors='replace')}")
                if event.get("error") is not None:
                    raise ServerError(_message(event))
                yield event
            raise ServerError(f"{self.url}: the stream ended before the answer did")
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: {_why(error)}") from error
        finally:
            connection.close()

    def _ask(
        self, method: str, route: str, body: Mapping[str, Any] | None,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Returns the connection and the head of an answer with status 200.  Raises ServerError."""
        connection: http.client.HTTPConnection
        if self._is_encrypted:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_SECONDS, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            try:
                connection.connect()
                connection.sock.settimeout(None)  # an answer may wait for a slot: Ctrl-C ends the wait
                content = None if body is None else json.dumps(body).encode()
                connection.request(method, f"{self._path}{route}", content, self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                hint = "; start a server with `slotwise serve`, or check the address" * isinstance(
                    error, ConnectionRefusedError)
                raise ServerError(f"no server answers at {self.url}: {_why(error)}{hint}") from error
            if response.status != HTTPStatus.OK:
                raise ServerError(self._refusal(response))
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _refusal(self, response: http.client.HTTPResponse) -> str:
        content = response.read(MOST_BODY)
        said = _message(_decoded(content)) or content[:200].decode(errors="replace")
        if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return f"{self.url} asks for a key: give it with --api-key or in ${KEY_VARIABLE} ({said})"
        if moved := response.headers.get("Location"):
            return f"{self.url} redirects to {printable(moved)}: give that address"
        return said if 400 <= response.status < 500 and said else f"{self.url}: {response.status} {said}"


def _decoded(content: bytes) -> Any:
    """Returns what JSON says; None for any other text."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _message(said: Any) -> str:
    """Returns the message in an error's body, in any of the usual shapes; "" if it has no message."""
    while isinstance(said, dict):
        said = said.get("error") or said.get("message") or said.get("detail")
    return said if isinstance(said, str) else ""


def _why(error: BaseException) -> str:
    """Returns what an error of the connection says, without numbers."""
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, TimeoutError):
        return f"nothing came within {CONNECT_SECONDS:g} s"
    return str(error) or type(error).__name__
