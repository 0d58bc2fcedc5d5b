"""The version of this package, for every floor."""

__version__ = "0.1.0"
