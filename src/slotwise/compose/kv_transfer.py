"""Joins an engine to those that compute prompts for it, or that it computes prompts for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slotwise.core.limits import SchedulerLimits
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.executor import Executor
from slotwise.engine.kv_link import Transferring
from slotwise.errors import described
from slotwise.kernels.cpu.threads import roam
from slotwise.kernels.interface import Kernels
from slotwise.runner.kv_blocks import HostCacheBlocks
from slotwise.runner.prefault import Prefault
from slotwise.transfer.connectors import connector_of
from slotwise.transfer.receiver import Receiver
from slotwise.transfer.sender import Sender
from slotwise.transfer.settings import KVTransferConfig


def check_transfers(config: EngineConfig, limits: SchedulerLimits, kernels: Kernels) -> None:
    """Raises ConfigError where the blocks of this model cannot travel."""
    if config.kv_transfer_config is None:
        return
    if kernels.device.type != "cpu":
        raise ConfigError(f"kv_transfer_config needs device cpu, not {kernels.device.type}")
    if any(limits.windows):
        raise ConfigError("kv_transfer_config is not supported with windowed attention or recurrent states: leave it "
                          "out")


def linked(
    transfer: KVTransferConfig | None, runner: Executor, pieces: Sequence[Tensor], limits: SchedulerLimits,
    identity: str,
) -> Transferring | None:
    """Returns the link of an engine, which listens if it sends prompts; None: it has none.

    Args:
        runner: its executor.
        pieces: its caches, as `[blocks, ...]`.
        identity: of its model.

    Raises:
        ConfigError: its address cannot be had.
    """
    if transfer is None:
        return None
    blocks = HostCacheBlocks(pieces, f"{limits.block_size} tokens of model {identity}")
    try:
        connector = connector_of(transfer, blocks.block_bytes)
        sender = None if not transfer.is_producer else Sender(
            blocks, connector.listen(transfer.kv_ip, transfer.kv_port), transfer.timeout, roam)
    except OSError as error:
        raise ConfigError(f"kv_transfer_config: {transfer.kv_ip}:{transfer.kv_port}: {described(error)}") from error
    receiver = Receiver(blocks, connector, transfer.timeout, roam) if transfer.is_consumer else None
    if transfer.is_consumer and isinstance(runner, Prefault):
        runner.touch_all()  # a prompt that arrives is written faster than one that is computed
    return Transferring(sender, receiver, limits.block_size)
