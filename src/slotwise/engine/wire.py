"""Messages as MessagePack, for the channel between two processes.  An engine alone in its process never comes here."""

from __future__ import annotations

import msgspec

from slotwise.engine.messages import Command, Locate, Report

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command | Locate).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
