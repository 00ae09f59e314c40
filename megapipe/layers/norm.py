"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.config.layers import LayerConfig
from megapipe.config.model import NORMALIZATIONS, ModelConfig, NormKind
from megapipe.sharding.spec import Init, Owner, ParamSpec, Replicated, Slicing


def branch_norms(model: LayerConfig, before: str, after: str) -> tuple[NormTable | None, NormTable | None]:
    """Return the norms of a residual branch's input and output, of these names, where the layer has them."""
    names = (before if model.norm_position != "after" else None, after if model.norm_position != "before" else None)
    first, last = (None if name is None else NormTable.of(model, name) for name in names)
    return first, last


@dataclass(frozen=True)
class NormTable:
    """A norm over `size` channels. zero_centered: the weight is stored as gamma - 1."""

    name: str
    size: int
    kind: NormKind
    zero_centered: bool

    @classmethod
    def of(cls, model: ModelConfig, name: str, size: int | None = None) -> NormTable:
        """Return a norm of the model's kind; size: the hidden size if None."""
        return cls(
            name, size or model.hidden_size, NORMALIZATIONS[model.normalization], model.layernorm_zero_centered_gamma
        )

    def parameters(self, prefix: str, owner: Owner, partial_gradient: bool) -> Iterator[ParamSpec]:
        """Yield weight and bias.

        partial_gradient: each tp rank normalizes other tokens or heads, so that gradients are partial.
        """
        yield self.weight(prefix, owner, Replicated(), partial_gradient)
        if self.kind.has_bias:
            name, shape = f"{prefix}{self.name}.bias", (self.size,)
            yield ParamSpec(name, shape, owner, weight_decay=False, partial_gradient=partial_gradient)

    def weight(self, prefix: str, owner: Owner, slicing: Slicing, partial_gradient: bool = False) -> ParamSpec:
        """Return the weight, cut over tp as `slicing` says."""
        init = Init("zeros" if self.zero_centered else "ones")
        name, shape = f"{prefix}{self.name}.weight", (self.size,)
        return ParamSpec(name, shape, owner, slicing, init, weight_decay=False, partial_gradient=partial_gradient)
