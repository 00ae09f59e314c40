"""The dense MLP: x + norm(fc2(activation(fc1(norm(x))))), with either norm or both, gated (SwiGLU, GeGLU) or not."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.layers.branch import Branch


@dataclass(frozen=True, eq=False)
class MLPTable(Branch):
    """The MLP branch of one transformer layer, its norms included."""

    site = "has_mlp"
    recompute_modules = ("mlp", "activation")
