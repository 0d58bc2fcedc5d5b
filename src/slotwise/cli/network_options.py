"""Options of `slotwise serve` about who may reach it and how: hosts, pages of other sites, TLS, a proxy's prefix."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from slotwise.cli.options import input_file

ANY = "*"


def add_network_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("network")
    group.add_argument("--allowed-hosts", action="extend", default=[], type=_host_names, metavar="NAME",
                       help="names of this server that the Host header may have; on a loopback address "
                       "without keys all but localhost and its addresses are refused; repeatable, or a JSON list; "
                       "* allows any")
    _add_cors(group)
    group.add_argument("--ssl-certfile", type=input_file, metavar="FILE",
                       help="serve HTTPS with this certificate, in PEM, followed by those between it and its root")
    group.add_argument("--ssl-keyfile", type=input_file, metavar="FILE",
                       help="the certificate's private key, in PEM and not encrypted (default: in --ssl-certfile)")
    group.add_argument("--ssl-ca-certs", type=input_file, metavar="FILE",
                       help="certificates, in PEM: every client must have one that is signed by one of these")
    group.add_argument("--root-path", type=_root_path, metavar="PATH",
                       help="the path below which a reverse proxy shows this server, as /llm; requests may come with "
                       "it or without")


def _add_cors(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--allowed-origins", action="extend", default=[], type=_origins, metavar="ORIGIN",
                       help="sites whose pages may use this server from a browser, as https://example.com; "
                       "repeatable, or a JSON list; * allows any (default: only pages of this server)")
    group.add_argument("--allowed-methods", action="extend", default=[], type=_methods, metavar="METHOD",
                       help="methods that pages of these sites may use; repeatable, or a JSON list (default: all)")
    group.add_argument("--allowed-headers", action="extend", default=[], type=_header_names, metavar="HEADER",
                       help="headers that they may send; repeatable, or a JSON list (default: all)")
    group.add_argument("--allow-credentials", action="store_true",
                       help="they may send their visitors' cookies and certificates, for a proxy that checks these")


def network_settings(asked: argparse.Namespace) -> dict[str, Any]:
    """The network options given, by the names of `ServerSettings`.

    Raises:
        ValueError: options contradict each other, or one says nothing without another.
    """
    for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
        if getattr(asked, name) and not asked.allowed_origins:
            raise ValueError(f"{_option(name)} is about pages of other sites: name them with --allowed-origins")
    if asked.allow_credentials and {ANY, "null"} & set(asked.allowed_origins):
        raise ValueError("--allow-credentials needs the sites by name: with * or null in --allowed-origins any page "
                         "could act for its visitors")
    for name in ("ssl_keyfile", "ssl_ca_certs"):
        if getattr(asked, name) and not asked.ssl_certfile:
            raise ValueError(f"{_option(name)} needs --ssl-certfile, the certificate of this server")
    return {
        "host": asked.host, "allowed_hosts": tuple(asked.allowed_hosts),
        "allowed_origins": tuple(asked.allowed_origins), "allow_credentials": asked.allow_credentials,
        "allowed_methods": tuple(asked.allowed_methods) or (ANY,),
        "allowed_headers": tuple(asked.allowed_headers) or (ANY,), "root_path": asked.root_path or "",
        "ssl_certfile": asked.ssl_certfile or "", "ssl_keyfile": asked.ssl_keyfile or "",
        "ssl_ca_certs": asked.ssl_ca_certs or ""}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _listed(text: str) -> list[str]:
    """One value, or several as a JSON list."""
    if not text.startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [text]  # an address in brackets
    if not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f"must be a JSON list of strings, not {text}")
    return list(values)


def _host_names(text: str) -> list[str]:
    names = _listed(text)
    for name in names:
        if not re.fullmatch(r"\*|\[[0-9A-Fa-f:.]+\]|[\w.-]+", name):
            raise argparse.ArgumentTypeError(f"must be host names without ports, not {name!r}")
    return names


def _origins(text: str) -> list[str]:
    origins = _listed(text)
    for origin in origins:
        if not re.fullmatch(r"\*|null|[A-Za-z][\w+.-]*://[^/\s@]+", origin):
            raise argparse.ArgumentTypeError(f"must be origins like https://example.com:8443, not {origin!r}")
    return origins


def _methods(text: str) -> list[str]:
    methods = _listed(text)
    for method in methods:
        if not re.fullmatch(r"\*|[A-Z]+", method):
            raise argparse.ArgumentTypeError(f"must be methods like POST, not {method!r}")
    return methods


def _header_names(text: str) -> list[str]:
    names = _listed(text)
    for name in names:
        if not re.fullmatch(r"\*|[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
            raise argparse.ArgumentTypeError(f"must be names of headers, not {name!r}")
    return names


def _root_path(text: str) -> str:
    if not re.fullmatch(r"(/[\w.~-]+)+", text.removesuffix("/"), re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a path like /llm, not {text!r}")
    return text.removesuffix("/")
