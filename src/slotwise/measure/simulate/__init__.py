"""The serving engine without its surroundings: a replay of an event log, and traffic on a virtual clock.

Begin with `replay.py`, which makes the plans of a log again, and `simulator.py`, which `what_if.py` and
`capacity_search.py` use.
"""
