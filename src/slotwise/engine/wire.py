"""Encodes messages as MessagePack for the channel between two processes; not imported by the offline API."""

from __future__ import annotations

import msgspec

from slotwise.engine.messages import Command, QueuePositionQuery, Report

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command | QueuePositionQuery).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
