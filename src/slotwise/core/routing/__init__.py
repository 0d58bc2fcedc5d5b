"""Routing: which replica of a model serves a request, or that none does in time.

Standard library only; time is an argument, and the same calls give the same choices.
"""

from __future__ import annotations
