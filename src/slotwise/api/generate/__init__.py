"""The way of a request: from a decoded body over its prompt to an engine's `Add`, and back to choices."""
