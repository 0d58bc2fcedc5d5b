"""Composition: builds engines, engine processes and servers from settings, and measures the machine.

Begin with `engine.py` (an engine with scheduler, runner and model), `worker.py` (the engine process) and `api.py`
(the API process, which starts one through `launch.py`).
"""
