"""One file per family: how its config.json is read, and what its layers compute; `family_table.py` lists them."""
