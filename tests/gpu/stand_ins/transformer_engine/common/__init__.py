"""A stub for transformer_engine.common."""
