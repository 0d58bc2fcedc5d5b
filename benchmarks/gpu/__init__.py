"""Checks and measures the engine on a GPU; see gpu.md beside this folder."""
