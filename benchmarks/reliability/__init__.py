"""What a real server does under pressure: overload, disconnects, impossible requests, lost and frozen engines, ends.

Each scenario starts `slotwise serve` as a user would, ill-treats it, and accounts for every request it sent: one row of
the table in docs/reliability.md.
"""
