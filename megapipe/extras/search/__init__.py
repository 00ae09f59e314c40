"""Search for layouts that fit a number of accelerators and are fast, and the explanation of a flag with its cost."""
