"""Parsers of model outputs: text as it comes, to content, reasoning and tool calls.  Pure; standard library only.

Begin with `base_parser.py` (the interface, and how a format is written) and `json_calls.py` (one format);
`parser_table.py` names them all.
"""
