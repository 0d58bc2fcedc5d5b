"""Parsers of model outputs: text as it comes, to content, reasoning and tool calls.  Pure; standard library only.

Begin with `output_parser.py` (the interface, and how a format is written) and `hermes.py` (one format);
`output_format.py` names them all.
"""
