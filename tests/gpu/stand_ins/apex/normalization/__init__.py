"""A stand-in for apex.normalization."""
