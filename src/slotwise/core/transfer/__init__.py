"""Keys and values on their way from one engine to another: the settings, the protocol, and what carries it.

Standard library only; it knows requests and blocks by their names and numbers.
"""
