"""The connectors by name."""

from __future__ import annotations

from slotwise.transfer.interface import Connector
from slotwise.transfer.settings import SHARED_MEMORY, KVTransferConfig
from slotwise.transfer.shared_memory import SharedMemoryConnector
from slotwise.transfer.tcp import TCPConnector


def connector_of(config: KVTransferConfig, block_bytes: int) -> Connector:
    """Returns the connector that `config` names.  Raises TransferError: this system has none of that sort."""
    if config.kv_connector == SHARED_MEMORY:
        return SharedMemoryConnector(block_bytes, config.timeout)
    return TCPConnector(block_bytes, config.timeout, config.secret)
