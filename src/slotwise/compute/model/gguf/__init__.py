"""GGUF files as checkpoints: their metadata as a config, their tensors under the names that families read."""
