"""Batching disciplines (`disciplines.py`) and the settings that name them (`batching_settings.py`)."""
