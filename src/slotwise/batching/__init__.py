"""Batching disciplines: when requests may join a batch, and when they may leave it.

Begin with `core.interfaces.Discipline`, then `continuous.py`; `orca.py` and `groups.py` are the baselines, and
`settings.py` names them all.
"""
