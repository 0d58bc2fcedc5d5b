"""Quantized weights as checkpoints store them: readers that give a `QuantizedMatrix` of the kernels."""
