"""Times steps of a whole engine against the roofline of the machine."""
