"""The engine loop, the messages between the engine process and the API process, and admission control.

Begin with `engine.py` (one step), `messages.py` (what crosses the processes) and `client.py` (the API process's side).
`executor.py` is the interface of what runs a plan; `config.py` has all settings of an engine.
"""
