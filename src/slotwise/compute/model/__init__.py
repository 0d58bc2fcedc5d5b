"""Models: how a checkpoint is read, and what the layers of each family compute.

Begin with a family (`families/llama.py`) and `decoder.py`, which runs its layers.  `layers/` has what layers are made
of; `loading.py` reads a checkpoint, `family_table.py` lists the families.
"""
