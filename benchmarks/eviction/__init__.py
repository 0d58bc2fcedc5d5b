"""Compares orders of eviction in simulation, and what-ifs with real servers."""
