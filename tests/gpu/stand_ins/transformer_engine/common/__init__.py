"""A stand-in for transformer_engine.common."""
