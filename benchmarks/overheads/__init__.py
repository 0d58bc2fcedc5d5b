"""Measures what a feature costs, with it and without it in turn."""
