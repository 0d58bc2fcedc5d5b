"""Composition: builds engines, engine processes and servers from settings, and measures the machine.

Begin with `engine_builder.py` (an engine with scheduler, runner and model), `engine_process.py` (the engine process)
and `api_server.py` (the API process, which starts one through `launch.py`).
"""
