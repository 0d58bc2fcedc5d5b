"""Quantized weights as checkpoints store them: readers that give the `QuantisedMatrix` of `kernels/matrix.py`."""
