"""Tests of megapipe/gpu. None needs a GPU, nor gains by one; those that do are in tests/cuda."""
