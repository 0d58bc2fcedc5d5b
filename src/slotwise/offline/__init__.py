"""What `LLM` and `AsyncLLM` share: arguments, prompts, and outputs made of the engine's tokens."""
