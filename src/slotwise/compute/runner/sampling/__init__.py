"""Sampling: from logits to tokens and log-probabilities, for all rows of a step at once."""
