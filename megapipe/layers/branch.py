"""`Branch`: one residual branch of a layer, which others ask for its properties instead of its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megapipe.config.layers import LayerConfig


@dataclass(frozen=True, eq=False)
class Branch:
    """x + norm(part(norm(x))), with either norm or both.

    site: the field of a layer's configuration that says whether it has the branch. recompute_modules: those of
    --recompute-modules that make some of the branch again, besides layernorm.
    """

    model: LayerConfig

    site: ClassVar[str]
    recompute_modules: ClassVar[tuple[str, ...]]

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs that are not products with weights, per token."""
        return 0.0
