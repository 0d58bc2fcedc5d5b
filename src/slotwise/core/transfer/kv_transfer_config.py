"""Settings of transfers, with vLLM's names: `--kv-transfer-config '{"kv_connector": "TCPConnector", ...}'`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from slotwise.core.setting_fields import check_settings, json_object, real, setting, whole

SHARED_MEMORY, TCP = "SharedMemoryConnector", "TCPConnector"
CONNECTORS = {SHARED_MEMORY: "memory that two processes of one host share", TCP: "a connection between hosts"}
PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"
ROLES = {PRODUCER: "computes prompts and sends their blocks", CONSUMER: "receives blocks, and decodes", BOTH: "both"}
RECOMPUTE = "recompute"  # what becomes of blocks that do not arrive
PORT = 14579  # vLLM's default
TIMEOUT = 30.0  # seconds
PIN_TIMEOUT = 120.0  # seconds; longer than a consumer's queue
EXTRA = ("peers", "timeout", "pin_timeout")  # keys of kv_connector_extra_config
LOCAL = ("127.0.0.1", "localhost")
SECRET = "SLOTWISE_KV_TRANSFER_SECRET"  # the variable of the environment with the transfer secret
LEAST_SECRET, MOST_SECRET = 16, 1024  # characters
HOW = f"set {SECRET}, or name its file with --kv-transfer-secret-file"


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """The settings.

    Raises:
        ValueError: they are invalid or contradict each other; the message is one line.
    """

    kv_connector: str = setting(
        help="how blocks travel: SharedMemoryConnector between processes of one host and one user, on Linux; "
        "TCPConnector between any hosts", choices=tuple(CONNECTORS))
    kv_role: str = setting(
        help="what this engine does: kv_producer computes prompts and sends them, kv_consumer receives them, kv_both "
        "does both", choices=tuple(ROLES))
    kv_ip: str = setting("127.0.0.1", "where a producer listens, and where its consumers reach it")
    kv_port: int = setting(PORT, "its port", range=whole(1, 65535))
    engine_id: str = setting("", "the producer's name, as consumers know it", otherwise="made up at the start")
    peers: tuple[str, ...] = setting(
        (), "addresses, HOST:PORT or HOST, of producers that a consumer may connect to",
        name="kv_connector_extra_config.peers")
    timeout: float = setting(
        TIMEOUT, "time without a sign of the other engine", unit="seconds", range=real(0.01, 3600),
        name="kv_connector_extra_config.timeout")
    pin_timeout: float = setting(
        PIN_TIMEOUT, "time for which a producer keeps a prompt that no consumer has asked for", unit="seconds",
        range=real(0.01, 3600), name="kv_connector_extra_config.pin_timeout")
    secret: str = field(default="", repr=False)  # shared by all servers and routers between which prompts travel

    def __post_init__(self) -> None:
        check_settings(self)
        if not (isinstance(self.kv_ip, str) and self.kv_ip):
            raise ValueError(f"kv_ip must be a host's name or address, not {self.kv_ip!r:.60}")
        if self.is_consumer and not self.peers:
            raise ValueError(f"kv_role {self.kv_role} needs kv_connector_extra_config.peers: the producers' addresses")
        if self.peers and not self.is_consumer:
            raise ValueError(f"kv_connector_extra_config.peers has no effect with kv_role {self.kv_role}")
        if self.kv_connector == SHARED_MEMORY and self.kv_ip not in LOCAL:
            raise ValueError(f"kv_ip must be {LOCAL[0]} with {SHARED_MEMORY}, which joins processes of one host")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> KVTransferConfig:
        """Returns the settings of a JSON object.  Raises ValueError for an unknown name, too."""
        settings = dict(given)
        known = [one.name for one in fields(cls) if one.name not in (*EXTRA, "secret")]
        extra = settings.pop("kv_connector_extra_config", {})
        if settings.pop("kv_load_failure_policy", RECOMPUTE) != RECOMPUTE:
            raise ValueError(f"kv_load_failure_policy must be {RECOMPUTE}: what does not arrive is computed")
        for name in settings:
            if name == "secret":
                raise ValueError(f"secret: other users of a machine see its command lines: {HOW}")
            if name not in known:
                keys = [*known, "kv_load_failure_policy", "kv_connector_extra_config"]
                raise ValueError(f"there is no key {name!r:.60}; there are {', '.join(keys)}")
        for name in ("kv_connector", "kv_role"):
            if name not in settings:
                raise ValueError(f"{name} is missing")
        return cls(**settings, **_extra(extra))

    @classmethod
    def read(cls, text: str) -> KVTransferConfig:
        """Reads the settings as JSON.  Raises ValueError."""
        return cls.of(json_object(text))

    @property
    def is_producer(self) -> bool:
        return self.kv_role in (PRODUCER, BOTH)

    @property
    def is_consumer(self) -> bool:
        return self.kv_role in (CONSUMER, BOTH)

    def accepts(self, host: str, port: int) -> bool:
        """Whether a consumer may connect to this producer."""
        return f"{host}:{port}" in self.peers or host in self.peers

    def told(self) -> KVTransferConfig:
        """Returns the settings as others may know them: with an `engine_id`, and without the secret."""
        return replace(self, engine_id=self.engine_id or str(uuid.uuid4()), secret="")


def secret_of(file: str, environment: Mapping[str, str]) -> str:
    """Returns the transfer secret in `file`, or without one that of the environment; "": not configured.

    Raises:
        ValueError: it is not a secret that a header can carry.
        OSError: the file cannot be read.
    """
    if not file and SECRET not in environment:
        return ""
    secret = (Path(file).read_text() if file else environment[SECRET]).strip()
    if not (LEAST_SECRET <= len(secret) <= MOST_SECRET and secret.isascii() and secret.isprintable()
            and " " not in secret):
        raise ValueError(f"{file or SECRET}: a transfer secret has {LEAST_SECRET} to {MOST_SECRET} characters of ASCII "
                         "and no spaces: take 32 or more random ones, as of `openssl rand -hex 32`")
    return secret


def _extra(given: Any) -> dict[str, Any]:
    """Returns the fields of `kv_connector_extra_config`."""
    if not isinstance(given, Mapping):
        raise ValueError(f"kv_connector_extra_config must be an object, not {given!r:.60}")
    for name in given:
        if name not in EXTRA:
            raise ValueError(f"kv_connector_extra_config has no key {name!r:.60}; there are {', '.join(EXTRA)}")
    found = dict(given)
    if "peers" in found:
        peers = found["peers"]
        if not isinstance(peers, Sequence) or isinstance(peers, str) or not all(
                isinstance(peer, str) and peer for peer in peers):
            raise ValueError(f"kv_connector_extra_config.peers must be a list of addresses, not {peers!r:.60}")
        found["peers"] = tuple(peers)
    return found
