"""A stub for apex.normalization."""
