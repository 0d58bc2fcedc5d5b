"""Request bodies: how they are decoded, the fields that are known, and those that are refused by name."""
