"""The scheduler and all state of requests: pure, deterministic, standard library only; time is an argument.

Begin with `request.py` (a request's tokens and states) and `scheduler.py` (how a step is planned and committed); then
`record.py` (plan, result and record of a step) and `kv_manager.py` (blocks).
"""
