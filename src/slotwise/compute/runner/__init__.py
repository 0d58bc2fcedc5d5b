"""The executor on a real model: plans as tensors, one forward pass per step, sampling, and host memory for blocks.

Begin with `model_runner.py` (a step from plan to result), `input_batch.py` (the slots as tensors) and `slots.py` (what
else is kept by slot); `sampling/` turns logits into tokens.
"""
