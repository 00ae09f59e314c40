"""A stub for NVIDIA apex."""
