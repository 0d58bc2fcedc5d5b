"""GGUF files (github.com/ggml-org/ggml, docs/gguf.md), read without trust: llama.cpp's format of models in one file.

Standard library only: the engine reads weights and config from a file, the API process its tokenizer and template.
"""
