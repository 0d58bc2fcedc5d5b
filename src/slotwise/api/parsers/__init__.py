"""Parsers of model outputs: text as it comes, to content, reasoning and tool calls.  Pure; standard library only.

Begin with `base_parser.py` (the interface, and how a format is written) and `hermes.py` (one format);
`parser_table.py` names them all.
"""
