"""The executor on a real model: plans as tensors, one forward pass a step, sampling, and host memory for blocks.

Begin with `model_runner.py` (a step from plan to result) and `input_batch.py` (the slots as tensors); `sampling/` turns
logits into tokens.
"""
