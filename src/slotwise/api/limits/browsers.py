"""Keeps web pages of other sites, opened in a browser on this machine, from using the server.

A browser sends requests to any address that a page names.  Four checks tell such requests from those of programs:

- `Host`: by DNS rebinding a page's own name may come to mean 127.0.0.1.  A server on a loopback address without keys
  answers only names that always mean this machine, and those of `--allowed-hosts`.  No request may have two.
- `Origin`: a browser names the site of the page.  It must be this server's own or one of `--allowed-origins`, and the
  method one of `--allowed-methods`.
- `Sec-Fetch-Site`: a browser names no origin with the GET of a script or an image, but says that another site's page
  sends it.  Where hosts are checked, only a link to this server (`Sec-Fetch-Mode: navigate`) is followed.
- `Content-Type`: a page may send text/plain or a form anywhere without asking first (a "simple request" of the Fetch
  standard), but not application/json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from ipaddress import ip_address

from slotwise.api.http.api_errors import ApiError, bad_request
from slotwise.api.limits.server_settings import ServerSettings

Headers = list[tuple[bytes, bytes]]
JSON = b"application/json"
WITH_A_BODY = ("POST", "PUT")
MAX_HOST = 262  # bytes of a Host header: a name of DNS, and a port
MAX_SHOWN = 100  # characters of a header that an error repeats
ANY = "*"
FORWARDED = (b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip")  # by a proxy, for another client
METHODS = ("GET", "POST", "PUT", "DELETE")
PREFLIGHT_METHOD = "OPTIONS"
CREDENTIALS = (b"access-control-allow-credentials", b"true")

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:/@]+)(:\d{0,5})?", re.IGNORECASE)
_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, \t-]{1,4096}")


class Browsers:
    """The checks, with the hosts and origins that a server allows."""

    def __init__(self, settings: ServerSettings) -> None:
        self._names = {name.lower().strip("[]") for name in settings.allowed_hosts}
        self._checks_host = bool(self._names) and ANY not in self._names
        self._checks_if_local = not settings.all_keys and ANY not in self._names
        self._names.add(settings.host.lower())
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)
        self._methods = frozenset(settings.allowed_methods)
        self._headers = settings.allowed_headers
        self._allowed: Headers = [CREDENTIALS] if settings.allow_credentials else []
        self._known_host = lru_cache(256)(self._is_ours)

    def listens_on(self, address: str) -> None:
        """Set the address that the server's socket is bound to: `--host` may be a name, or written as 127.1."""
        self._checks_host |= self._checks_if_local and is_loopback(address)

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> Headers:
        """CORS headers of the response to a page that may read it.

        Raises:
            ApiError: the request is for another host, or from a page that may not send it.
        """
        host = headers.get(b"host")
        if self._checks_host and host is not None and (len(host) > MAX_HOST or not self._known_host(host)):
            raise ApiError(HTTPStatus.FORBIDDEN, f"this server does not answer for the host {_shown(host)}; start it "
                           "with --allowed-hosts to add names", "Host", "host_not_allowed")
        origin = headers.get(b"origin")
        if origin is None and self._checks_host and ANY not in self._origins and _is_cross_site(headers):
            raise ApiError(HTTPStatus.FORBIDDEN, "pages of other sites may not use this server; start it with "
                           "--allowed-origins and send requests that name their origin (mode: cors)",
                           "Sec-Fetch-Site", "origin_not_allowed")
        if origin is None or (host is not None and _authority(origin) == host.lower()):
            return []
        if origin.decode("latin-1").lower() not in self._origins and ANY not in self._origins:
            raise ApiError(HTTPStatus.FORBIDDEN, f"pages of {_shown(origin)} may not use this server; start it with "
                           "--allowed-origins to let them", "Origin", "origin_not_allowed")
        if method != PREFLIGHT_METHOD and not self._may_use(method):
            raise ApiError(HTTPStatus.FORBIDDEN, f"pages of other sites may not send {method}; start the server with "
                           "--allowed-methods to let them", "Origin", "method_not_allowed")
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), *self._allowed]

    def preflight(self, headers: Mapping[bytes, bytes]) -> Headers:
        """Headers of the answer to a preflight: what a page may send, which its browser then compares."""
        methods = METHODS if ANY in self._methods else sorted(self._methods)
        if ANY not in self._headers:
            names = ", ".join(self._headers).encode()
        elif not _NAMES.fullmatch(names := headers.get(b"access-control-request-headers", b"")):
            names = b""  # none, or what no browser sends
        named = [(b"access-control-allow-headers", names)] if names else []
        return [(b"access-control-allow-methods", ", ".join(methods).encode()), *named,
                (b"access-control-max-age", b"600")]

    def _may_use(self, method: str) -> bool:
        return ANY in self._methods or method in self._methods

    def _is_ours(self, host: bytes) -> bool:
        found = _HOST.fullmatch(host.decode("latin-1"))
        return found is not None and (found["name"].strip("[]").lower() in self._names or is_loopback(found["name"]))


def check_one_host(headers: Headers) -> None:
    """Raises ApiError for a request with two Host headers: a proxy may have judged the other one (RFC 9112, 3.2)."""
    if [name for name, _ in headers].count(b"host") > 1:
        raise bad_request("Host: a request has one Host header", "Host")


def check_json(headers: Mapping[bytes, bytes]) -> None:
    """Raises ApiError for a body that is not declared as JSON."""
    if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
        return
    given = headers.get(b"content-type", b"")
    if given.partition(b";")[0].strip().lower() != JSON:
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be sent with Content-Type: application/json, "
                       f"not {_shown(given) if given else 'without one'}", "Content-Type", "json_needed")


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether this is a CORS preflight of the Fetch standard: a browser checks if a page may send a request."""
    return method == PREFLIGHT_METHOD and b"origin" in headers and b"access-control-request-method" in headers


def is_loopback(name: str) -> bool:
    """Whether a host name or address always means this machine."""
    name = name.lower().strip("[]").removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback  # ::ffff:127.0.0.1
    except ValueError:
        return False


def is_local(address: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request comes from this machine, and through no proxy that says so.  Args: address: the client's."""
    return is_loopback(address) and not any(name in headers for name in FORWARDED)


def _is_cross_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of another site sends the request, without going to its answer; a frame stays in that page."""
    goes = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest", b"document") == b"document"
    return headers.get(b"sec-fetch-site") == b"cross-site" and not goes


def _authority(origin: bytes) -> bytes:
    return origin.lower().partition(b"://")[2]


def _shown(header: bytes) -> str:
    return repr(header.decode("latin-1")[:MAX_SHOWN])
