"""Batching disciplines (`disciplines.py`) and the settings that name them (`settings.py`)."""
