"""Measurements: a load generator for any server, offline runs, and their results."""
