"""Compares one GGUF file on Slotwise and on llama.cpp."""
