"""A stand-in for NVIDIA Transformer Engine."""

__version__ = "2.stand-in"
