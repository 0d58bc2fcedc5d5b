"""The version of this package, for every floor; pyproject.toml reads it from here."""

__version__ = "0.2.0"
