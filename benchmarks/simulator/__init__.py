"""Compares the simulator with real servers, and times it."""
