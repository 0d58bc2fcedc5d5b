"""The OpenAI-compatible HTTP service.  It uses the engine through its client and holds no tensors."""
