"""Slotwise and its peers on the same requests, each in an environment of its own."""
