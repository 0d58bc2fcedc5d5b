"""What other engines compute, each run by a Python of its own environment; nothing here imports Slotwise."""
