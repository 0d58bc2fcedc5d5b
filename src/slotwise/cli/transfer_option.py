"""The option of `slotwise serve` about prompts that travel between engines, with vLLM's name."""

from __future__ import annotations

import argparse
import os

from slotwise.cli.options import input_file, json_object
from slotwise.transfer.settings import SECRET, KVTransferConfig, secret_of


def add_transfer_option(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("prefill and decode apart")
    group.add_argument("--kv-transfer-config", type=transfer, metavar="JSON", default=None,
                       help="prompts are computed by one engine and decoded by another, as {\"kv_connector\": "
                       "\"TCPConnector\", \"kv_role\": \"kv_producer\", \"kv_port\": 14579}; docs/disaggregation.md "
                       "has all keys (default: every engine computes its prompts)")
    group.add_argument("--kv-transfer-secret-file", type=input_file, metavar="FILE", default=None,
                       help="holds the secret that all servers and routers between which prompts travel share, and "
                       f"requests with kv_transfer_params name (default: that of ${SECRET})")


def transfer_secret_of(asked: argparse.Namespace) -> str:
    """The transfer secret, "" if not configured.  Raises ValueError, OSError: one line that says what is wrong."""
    return secret_of(asked.kv_transfer_secret_file or "", os.environ)


def transfer(text: str) -> KVTransferConfig:
    """The type of an option with the settings of transfers."""
    try:
        return KVTransferConfig.of(json_object(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
