"""The scheduler and all state of requests: pure, deterministic, standard library only; time is an argument.

Begin with `request.py` (a request's tokens and states) and `scheduler.py` (how a step is planned and committed); then
`step.py` (the plan that leaves the core), `record.py` (a step as everyone else sees it) and `kv_manager.py` (blocks).
"""
