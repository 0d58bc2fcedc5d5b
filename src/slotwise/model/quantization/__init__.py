"""Quantized weights as checkpoints store them: readers that give the `QuantizedMatrix` of `kernels/matrix.py`."""
