"""Anthropic's endpoints: messages, and the count of their tokens."""
