"""The scheduler and all state of requests: pure, deterministic, standard library only; time is an argument.

Begin with `request.py` (a request's tokens and states) and `scheduler.py` (how a step is planned and committed); then
`step.py`, the plan that leaves the core.  `request_table.py` and `kv_manager.py` own requests, slots and blocks.
"""
