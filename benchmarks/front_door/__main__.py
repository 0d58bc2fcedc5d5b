"""Measures a real model on real chats: Slotwise beside its peers, and what its features gain."""

from __future__ import annotations

from benchmarks.commands import run

run("front_door", __doc__ or "", ("peers", "features"))
