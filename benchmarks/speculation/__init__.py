"""Measures what speculative decoding gains, and what proposing drafts costs."""
