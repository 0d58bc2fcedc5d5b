"""Settings of the HTTP service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from slotwise.core.pooling_defaults import PoolingDefaults
from slotwise.core.sampling_defaults import SamplingDefaults
from slotwise.engine.heartbeat import ENGINE_TIMEOUT
from slotwise.observe.lines import TEXT
from slotwise.server.tiers import ServedTier


class LoraModule(NamedTuple):
    """An adapter to be served."""

    name: str
    path: str  # a folder
    base_model_name: str = ""  # what is told as its parent; empty: the served model


@dataclass(frozen=True, slots=True)
class ServerSettings:
    served_model_name: str  # in responses and metrics
    more_model_names: tuple[str, ...] = ()  # further names by which clients may ask for it
    lora_modules: tuple[LoraModule, ...] = ()  # adapters that are loaded at the start
    api_keys: tuple[str, ...] = ()  # each a tenant, like the keys of tiers; none: no key is needed
    admin_api_key: str = ""  # the only key that may change scheduling; empty: see keys.Keys.admin
    tiers: tuple[ServedTier, ...] = ()  # classes of service, as at the start
    max_body_bytes: int = 4 << 20  # a million token ids; decoding a body delays every stream
    header_timeout: float = 10.0  # seconds for the first byte of a connection, and for the rest of each head
    body_timeout: float = 60.0  # seconds a request's body may take to arrive
    keep_alive_timeout: int = 75  # seconds between two requests; balancers close idle connections after a minute
    unread_timeout: float = 30.0  # seconds for which a client may read nothing of what was written
    silence_timeout: float = 15.0  # seconds without an event after which a stream shows a sign of life
    max_choices: int = 1024  # choices of one request, prompts times `n`
    shutdown_timeout: float = 30.0  # seconds that running requests have at the end
    engine_timeout: float = ENGINE_TIMEOUT  # seconds without a heartbeat after which the engine is restarted
    max_num_queued_reqs: int | None = None  # requests waiting for their first slot; None: engine.admission_control
    max_num_queued_tokens: int | None = None  # tokens of their prompts, likewise
    queue_timeout: float = 0.0  # seconds a request may wait for its first slot; 0: no limit
    stream_interval: int = 1  # tokens per streamed event, after the first
    event_log: str = ""  # a file that is written anew, with all events; empty: none
    overwrite_event_log: bool = False  # replace any file of that name
    otlp_traces_endpoint: str = ""  # a collector's URL, for OTLP over HTTP; empty: nothing is traced
    log_format: str = TEXT  # of stderr: see observe.lines
    log_stats: bool = True  # log the load, every ten seconds
    log_requests: bool = False  # log a line for each request to generate
    access_log: bool = False  # log a line for each HTTP exchange
    max_log_len: int = 0  # characters of a request's prompts in its line
    vllm_metrics: bool = False  # metrics that vLLM has are there under its names, too
    notices: tuple[str, ...] = ()  # lines to log at the start
    engine_environment: Mapping[str, str] = field(default_factory=dict)  # variables of the engine's process
    host: str = ""  # the name or address it listens on; it may stand in `Host`
    allowed_hosts: tuple[str, ...] = ()  # further names in `Host`, without ports; "*": any
    allowed_origins: tuple[str, ...] = ()  # sites whose pages may use the server, as scheme://host:port; "*": any
    allowed_methods: tuple[str, ...] = ("*",)  # of their requests; "*": any
    allowed_headers: tuple[str, ...] = ("*",)  # likewise
    allow_credentials: bool = False  # their requests may carry cookies
    ssl_certfile: str = ""  # a certificate, in PEM; empty: HTTP without TLS
    ssl_keyfile: str = ""  # its private key; empty: it is in the same file
    ssl_ca_certs: str = ""  # one of these has signed the certificate that each client must have; empty: none needs one
    root_path: str = ""  # prefix of paths, without a slash at its end, below which a reverse proxy shows this server
    seed: int = 0  # generates the seeds of requests without one
    tool_call_parser: str = ""  # how the model calls tools; empty: as its chat template tells
    enable_auto_tool_choice: bool | None = None  # answers may call tools; None: where it is known how the model does
    reasoning_parser: str = ""  # how the model's reasoning is told from its answer; empty: it is not
    trust_request_chat_template: bool = False  # render the chat templates that requests bring
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)  # where a request names none
    pooling_defaults: PoolingDefaults = field(default_factory=PoolingDefaults)  # of vectors, likewise
    kv_transfer_secret: str = field(default="", repr=False)  # opens `kv_transfer_params`; empty: nothing does

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names by which clients may ask for the model."""
        return (self.served_model_name, *self.more_model_names)

    @property
    def all_keys(self) -> tuple[str, ...]:
        """The keys of all tenants."""
        return tuple(dict.fromkeys([*self.api_keys, *[key for served in self.tiers for key in served.api_keys]]))
