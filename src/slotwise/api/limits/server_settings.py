"""Settings of the HTTP service."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from slotwise.api.parsers.parser_table import REASONING_ALIASES, REASONING_PARSERS
from slotwise.api.parsers.parser_table import TEXT as NO_REASONING
from slotwise.api.parsers.tool_formats import ALIASES as TOOL_ALIASES
from slotwise.api.parsers.tool_formats import FORMATS as TOOL_PARSERS
from slotwise.core.request_defaults import PoolingDefaults, SamplingDefaults
from slotwise.core.scheduler_limits import ADAPTERS
from slotwise.core.setting_fields import check_settings, real, setting, whole
from slotwise.engine.admission_control import PATIENCE
from slotwise.engine.config import DAY
from slotwise.engine.ipc import ENGINE_TIMEOUT, SHORTEST_TIMEOUT
from slotwise.errors import printable
from slotwise.observe.lines import FORMATS, TEXT
from slotwise.platform.files import existing_file

if TYPE_CHECKING:
    from slotwise.api.limits.tiers import ServedTier

MODEL, LIMITS, LOGS, NETWORK = "served model", "limits of requests", "logs and traces", "network"  # headings of options
MODULE = 'must be NAME=PATH, or {"name": NAME, "path": PATH, "base_model_name": NAME} as JSON'
ANY = "*"


def read_key(text: str) -> str:
    """Reads an API key.  Raises ValueError."""
    from slotwise.api.limits.api_keys import key_of

    return key_of(text)


def read_host(text: str) -> str:
    """Reads an address to listen on.  An empty one, as of an unset variable, would mean all addresses."""
    if not text.strip() or not text.isprintable():
        raise ValueError(f"must be a name or an address, and 0.0.0.0 for all of this machine, not {text!r:.40}")
    return text


def read_list(text: str) -> list[str]:
    """Reads one value, or several as a JSON list."""
    if not text.startswith("["):
        return [text]
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [text]  # an address in brackets
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"must be a JSON list of strings, not {text}")
    return list(values)


def _matching(text: str, pattern: str, what: str) -> list[str]:
    """Reads a list whose values all match a pattern."""
    values = read_list(text)
    for value in values:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {what}, not {value!r}")
    return values


def read_host_names(text: str) -> list[str]:
    return _matching(text, r"\*|\[[0-9A-Fa-f:.]+\]|[\w.-]+", "host names without ports")


def read_origins(text: str) -> list[str]:
    return _matching(text, r"\*|null|[A-Za-z][\w+.-]*://[^/\s@]+", "origins like https://example.com:8443")


def read_methods(text: str) -> list[str]:
    return _matching(text, r"\*|[A-Z]+", "methods like POST")


def read_header_names(text: str) -> list[str]:
    return _matching(text, r"\*|[A-Za-z0-9!#$%&'*+.^_`|~-]+", "names of headers")


def read_root_path(text: str) -> str:
    if not re.fullmatch(r"(/[\w.~-]+)+", text.removesuffix("/"), re.ASCII):
        raise ValueError(f"must be a path like /llm, not {text!r}")
    return text.removesuffix("/")


class LoraModule(NamedTuple):
    """An adapter to be served."""

    name: str
    path: str  # a folder
    base_model_name: str = ""  # what is told as its parent; empty: the served model

    @classmethod
    def read(cls, text: str) -> LoraModule:
        """Reads `NAME=PATH`, or the fields as JSON.  Raises ValueError."""
        if text.startswith("{"):
            try:
                given = json.loads(text)
            except (ValueError, RecursionError):
                given = None
            if not isinstance(given, dict) or not {"name", "path"} <= given.keys() <= set(cls._fields) or not all(
                    isinstance(value, str) and value for value in given.values()):
                raise ValueError(f"{MODULE}, not {printable(text[:80])}")
            return cls(**given)
        name, separator, path = text.partition("=")
        if not (separator and name and path):
            raise ValueError(f"{MODULE}, not {printable(text[:80])}; the model stands before the options")
        return cls(name, path)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Raises ValueError: two settings contradict each other, or one says nothing without another."""

    served_model_name: str  # in responses and metrics
    more_model_names: tuple[str, ...] = ()  # further names by which clients may ask for it
    model_aliases: tuple[str, ...] = ()  # names that requests may use, too, and that no list shows: paths for one
    host: str = setting("127.0.0.1", "address to listen on", otherwise="this machine only", read=read_host,
                        is_common=True)
    port: int = setting(8000, "port to listen on; 0: any free port", range=whole(0, 65_535), is_common=True)
    api_keys: tuple[str, ...] = setting(
        (), "a key that clients send as a bearer token; repeatable; keys share no cached prefixes", unit="key",
        otherwise="those in $SLOTWISE_API_KEY, comma separated", name="api_key", read=lambda text: [read_key(text)],
        is_common=True)
    admin_api_key: str = setting(
        "", "the only key that may use /admin", unit="key", otherwise="$SLOTWISE_ADMIN_API_KEY; without one, clients "
        "on this machine may where no key is needed, and else no client", read=read_key)
    tiers: tuple[ServedTier, ...] = ()  # classes of service, as at the start
    enable_auto_tool_choice: bool | None = setting(
        None, "answers may call the tools that a request lists", otherwise="where it is known how the model calls them",
        group=MODEL)
    tool_call_parser: str = setting(
        "", f"how the model calls tools: {', '.join(sorted(TOOL_PARSERS))}", unit="name",
        choices=(*TOOL_PARSERS, *TOOL_ALIASES), otherwise="as its chat template tells", group=MODEL)
    reasoning_parser: str = setting(
        "", f"how the model's reasoning is told from its answer: {', '.join(sorted(REASONING_PARSERS))}, or "
        f"{NO_REASONING}: it is part of the answer", unit="name",
        choices=(*REASONING_PARSERS, *REASONING_ALIASES, NO_REASONING), otherwise="as its chat template tells",
        group=MODEL)
    trust_request_chat_template: bool = setting(
        default=False, help="render chat templates that requests bring", otherwise="refuse them with 400", group=MODEL)
    max_num_queued_reqs: int | None = setting(
        None, "requests that may wait for a first slot, 8/9 of them of one key; more get 503", range=whole(1),
        otherwise=f"what should start within {PATIENCE:g} s, at the measured rate", group=LIMITS)
    max_num_queued_tokens: int | None = setting(
        None, "prompt tokens of requests that wait for a first slot, 8/9 of them of one key; more get 503",
        unit="tokens", range=whole(1), otherwise=f"what should start within {PATIENCE:g} s, at the measured rate",
        group=LIMITS)
    queue_timeout: float = setting(
        0.0, "time after which a request that still waits for its first slot gets 504", unit="seconds",
        range=real(0, DAY), otherwise="0, no limit", group=LIMITS)
    engine_timeout: float = setting(
        ENGINE_TIMEOUT, "silence after which the engine process is killed and replaced; after half of it /health is "
        "503", unit="seconds", range=real(SHORTEST_TIMEOUT, DAY), group=LIMITS)
    shutdown_timeout: float = setting(
        30.0, "time that running requests have to end after SIGTERM, SIGHUP or Ctrl-C", unit="seconds",
        range=real(0, DAY), group=LIMITS)
    stream_interval: int = setting(
        1, "tokens of each event of a stream", unit="tokens", range=whole(1, 65_536), group=LIMITS)
    max_body_bytes: int = 4 << 20  # a million token ids; decoding a body delays every stream
    header_timeout: float = 10.0  # seconds for the first byte of a connection, and for the rest of each head
    body_timeout: float = 60.0  # seconds a request's body may take to arrive
    keep_alive_timeout: int = 75  # seconds between two requests; balancers close idle connections after a minute
    unread_timeout: float = 30.0  # seconds for which a client may read nothing of what was written
    silence_timeout: float = 15.0  # seconds without an event after which a stream shows a sign of life
    max_choices: int = 1024  # choices of one request, prompts times `n`
    event_log: str = setting(
        "", "write the event log here, prompts included: up to 1 kB for a step of 16 rows", unit="file",
        otherwise="only the latest entries are kept, in memory", group=LOGS)
    overwrite_event_log: bool = setting(
        default=False, help="replace the file of {event_log} even where it is not an event log, or is another user's",
        group=LOGS)
    otlp_traces_endpoint: str = setting(
        "", "send a span for each request and its stages to this collector, by OTLP over HTTP "
        "(http://127.0.0.1:4318/v1/traces; needs slotwise[otel])", unit="URL", group=LOGS)
    log_format: str = setting(
        TEXT, "lines on stderr: text, or a JSON object each", choices=FORMATS, group=LOGS)
    disable_log_stats: bool = setting(
        default=False, help="do not log the load every 10 s", group=LOGS)
    enable_log_requests: bool = setting(
        default=False, help="log a line for each generation request: id, tokens, status and times, but no text",
        group=LOGS)
    max_log_len: int = setting(
        0, "with {enable_log_requests}, that many characters of each request's prompts", unit="characters",
        range=whole(0, 10_000), group=LOGS)
    access_log: bool = setting(
        default=False, help="log a line for each HTTP exchange: method, path, status and time", group=LOGS)
    vllm_metrics: bool = setting(
        default=False, help="/metrics has vLLM's metrics under vLLM's names, too, for its dashboards and alert rules",
        group=LOGS)
    allowed_hosts: tuple[str, ...] = setting(
        (), "names of this server that the Host header may have; on a loopback address without keys all but localhost "
        "and its addresses are refused; repeatable, or a JSON list; * allows any", unit="name", read=read_host_names,
        group=NETWORK)
    allowed_origins: tuple[str, ...] = setting(
        (), "sites whose pages may use this server from a browser, as https://example.com; repeatable, or a JSON list; "
        "* allows any", unit="origin", otherwise="only pages of this server", read=read_origins, group=NETWORK)
    allowed_methods: tuple[str, ...] = setting(
        (ANY,), "methods that pages of {allowed_origins} may use; repeatable, or a JSON list", unit="method",
        otherwise="all", read=read_methods, group=NETWORK)
    allowed_headers: tuple[str, ...] = setting(
        (ANY,), "headers that pages of {allowed_origins} may send; repeatable, or a JSON list", unit="header",
        otherwise="all", read=read_header_names, group=NETWORK)
    allow_credentials: bool = setting(
        default=False, help="pages of {allowed_origins} may send their visitors' cookies and certificates, for a proxy "
        "that checks them",
        group=NETWORK)
    ssl_certfile: str = setting(
        "", "serve HTTPS with this certificate, in PEM, followed by those between it and its root", unit="file",
        read=existing_file, group=NETWORK)
    ssl_keyfile: str = setting(
        "", "the certificate's private key, in PEM and not encrypted", unit="file", otherwise="in {ssl_certfile}",
        read=existing_file, group=NETWORK)
    ssl_ca_certs: str = setting(
        "", "certificates, in PEM: every client must have one that is signed by one of these", unit="file",
        read=existing_file, group=NETWORK)
    ui: bool = setting(
        default=True, help="show the chat page at /", group=NETWORK)
    root_path: str = setting(
        "", "the path below which a reverse proxy shows this server, as /llm; requests may come with it or without",
        unit="path", read=read_root_path, group=NETWORK)
    lora_modules: tuple[LoraModule, ...] = setting(
        (), "adapters to load at the start: a name and a folder in the format of PEFT, or vLLM's JSON with name, path "
        "and base_model_name; POST /v1/load_lora_adapter loads more", unit="name=path", read=LoraModule.read,
        takes_many=True, group=ADAPTERS)
    notices: tuple[str, ...] = ()  # lines to log at the start
    engine_environment: Mapping[str, str] = field(default_factory=dict)  # variables of the engine's process
    seed: int = 0  # generates the seeds of requests without one
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # where a request names none
    pooling_defaults: PoolingDefaults = field(default_factory=PoolingDefaults)  # of vectors without parameters
    kv_transfer_secret: str = field(default="", repr=False)  # opens `kv_transfer_params`; empty: nothing does
    tenant_secret: bytes = field(default=b"", repr=False)  # keys the digests that name tenants; empty: a random one

    def __post_init__(self) -> None:
        check_settings(self)
        defaults: dict[str, Any] = {"allowed_methods": (ANY,), "allowed_headers": (ANY,), "allow_credentials": False}
        for name, default in defaults.items():
            if getattr(self, name) != default and not self.allowed_origins:
                raise ValueError(f"{name} is about pages of other sites: name them with allowed_origins")
        if self.allow_credentials and {ANY, "null"} & set(self.allowed_origins):
            raise ValueError("allow_credentials needs the sites by name: with * or null in allowed_origins any page "
                             "could act for its visitors")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ValueError(f"{name} needs ssl_certfile, the certificate of this server")

    def named(self, given: Sequence[str], own: str, aliases: tuple[str, ...]) -> ServerSettings:
        """Returns these settings for another model.

        Args:
            given: names that clients use; empty: `own`, and `aliases`, which no list shows.
        """
        first, *others = dict.fromkeys(given or [own])
        return replace(self, served_model_name=first, more_model_names=tuple(others),
                       model_aliases=() if given else aliases)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names by which clients may ask for the model."""
        return (self.served_model_name, *self.more_model_names)

    @property
    def all_keys(self) -> tuple[str, ...]:
        """The keys of all tenants."""
        return tuple(dict.fromkeys([*self.api_keys, *[key for served in self.tiers for key in served.api_keys]]))
