"""A stand-in for NVIDIA apex."""
