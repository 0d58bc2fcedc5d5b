"""HTTP: connections, exchanges, errors, and the worker processes that bound slow work."""
