"""Parsers of model outputs: text as it comes, to content, reasoning and tool calls.  Pure; standard library only.

Begin with `parts.py` (what comes out), `parser.py` (the interface, and how a format is written) and `hermes.py` (one
format).  `registry.py` names them all.
"""
