"""Measurements: a load generator for any server, offline runs, and how they are summed up."""
