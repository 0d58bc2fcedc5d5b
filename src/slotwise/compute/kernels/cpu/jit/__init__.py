"""Just-in-time compilation of the CPU's kernels.

`compiler.py` compiles and loads, `store.py` keeps machine code on disk, and `workers.py` starts processes that compile
in parallel.  Importing this package imports nothing.
"""
