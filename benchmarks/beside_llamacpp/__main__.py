"""Compares one GGUF file on Slotwise and on llama.cpp."""

from __future__ import annotations

from benchmarks.commands import run

run("beside_llamacpp", __doc__ or "", ("speed", "logits", "vocabularies"))
