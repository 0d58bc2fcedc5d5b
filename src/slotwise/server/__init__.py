"""The OpenAI-compatible HTTP service.  It knows the engine as a service and no tensors."""
