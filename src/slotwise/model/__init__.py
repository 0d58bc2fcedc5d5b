"""Models: how a checkpoint is read, and which layers each family composes.

Begin with `families.py` and one family (`llama.py`), then `network.py` (what a family describes) and `decoder.py` (the
one loop over layers); `load.py` reads weights.
"""
