"""The operations that models need: one contract, a reference in plain torch, and an implementation per device.

Begin with `interface.py` (the contract: shapes and meanings; `matrix.py` for quantized weights) and `reference.py`.
`select.py` chooses `reference.py`, `cpu/` or `cuda/`; `checked.py` and `timed.py` wrap any implementation.  `group.py`
is what ranks and pipeline stages exchange.
"""
