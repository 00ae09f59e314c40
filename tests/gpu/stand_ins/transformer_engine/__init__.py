"""A stub for NVIDIA Transformer Engine."""

__version__ = "2.stub"
