"""Tests real servers under pressure: overload, disconnects, impossible requests, lost and frozen engines, shutdown.

Each scenario starts `slotwise serve` as a user would, attacks it, and accounts for every request it sent: one row of
the table in benchmarks/results/reliability-cpu.md.
"""
