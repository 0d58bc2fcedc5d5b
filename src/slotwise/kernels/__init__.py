"""The operations that models need: one contract, a reference in plain torch, and an implementation per device.

Begin with `interface.py` (the contract: shapes and meanings) and `reference.py`; `select.py` chooses `cpu/` or `cuda/`.
`checked.py` and `timed.py` wrap any implementation.
"""
