"""Measures the five promises of docs/policies.md, on real servers or on a virtual clock."""
