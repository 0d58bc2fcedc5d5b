"""The option of `slotwise serve` about prompts that travel between engines, with vLLM's name."""

from __future__ import annotations

import argparse

from slotwise.cli.options import json_object
from slotwise.transfer.settings import KVTransferConfig


def add_transfer_option(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("prefill and decode apart")
    group.add_argument("--kv-transfer-config", type=transfer, metavar="JSON", default=None,
                       help="prompts are computed by one engine and decoded by another, as {\"kv_connector\": "
                       "\"TCPConnector\", \"kv_role\": \"kv_producer\", \"kv_port\": 14579}; docs/disaggregation.md "
                       "has all keys (default: every engine computes its prompts)")


def transfer(text: str) -> KVTransferConfig:
    """The type of an option with the settings of transfers."""
    try:
        return KVTransferConfig.of(json_object(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
