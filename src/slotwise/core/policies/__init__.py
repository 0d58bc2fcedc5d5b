"""Scheduling policies: the order of waiting, running and preempted requests.

Begin with `core.interfaces.Policy`, then `fcfs.py`, the default, from which the others derive;
`policy_settings.py` names them all.
"""
