"""The layers that families compose.  A layer reads and packs its weights when it is constructed."""
