"""Transformer Engine's Adam: apex's arithmetic with more options for the dtypes of its state."""

from __future__ import annotations

from apex.optimizers import FusedAdam

__all__ = ["FusedAdam"]
