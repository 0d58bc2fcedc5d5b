"""Slotwise serves language models with continuous batching: the batch is rebuilt at every forward pass."""

__version__ = "0.1.0"
