"""What other programs call things: one table of vLLM's names."""
