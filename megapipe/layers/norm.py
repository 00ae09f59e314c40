"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.config.model import ModelConfig
from megapipe.layers.table import Backward, Kept, Operation, RankShape
from megapipe.sharding.spec import Init, Owner, ParamSpec


@dataclass(frozen=True)
class Norm:
    """A norm over `size` channels. zero_centered: the weight is stored as gamma - 1."""

    name: str
    size: int
    kind: str  # LayerNorm or RMSNorm
    zero_centered: bool

    @classmethod
    def of(cls, model: ModelConfig, name: str, size: int | None = None) -> Norm:
        """Return a norm of the model's kind; size: the hidden size if None."""
        return cls(name, size or model.hidden_size, model.normalization, model.layernorm_zero_centered_gamma)

    def parameters(self, prefix: str, owner: Owner, partial_gradient: bool) -> Iterator[ParamSpec]:
        """Yield weight and bias.

        partial_gradient: each tp rank normalizes other tokens or heads, so that gradients are partial.
        """
        name, shape = f"{prefix}{self.name}", (self.size,)
        weight, is_partial = Init("zeros" if self.zero_centered else "ones"), partial_gradient
        yield ParamSpec(f"{name}.weight", shape, owner, init=weight, weight_decay=False, partial_gradient=is_partial)
        if self.kind == "LayerNorm":
            yield ParamSpec(f"{name}.bias", shape, owner, weight_decay=False, partial_gradient=is_partial)

    def statistics(self, vectors: int, shape: RankShape, name: str = "norm statistics") -> tuple[Kept, ...]:
        """Return the statistics kept of so many vectors: mean and variance, or the mean square alone."""
        return (Kept(name, vectors, shape.wide),) * (2 if self.kind == "LayerNorm" else 1)

    def operation(self, shape: RankShape, keeps_statistics: bool = True, backward: Backward | None = None) -> Operation:
        """Return the norm at the start of a residual branch: from the residual stream to the input of a linear."""
        hidden = shape.own_tokens * self.size
        keeps = [Kept("residual stream", hidden, shape.element)]
        if keeps_statistics:
            keeps += self.statistics(shape.own_tokens, shape)
        if not shape.recomputes("layernorm"):
            keeps.append(Kept("norm outputs", hidden, shape.element))
        return Operation(self.name, tuple(keeps), backward=backward)

    def gradient_bytes(self, shape: RankShape) -> int:
        """Return what the norm's backward makes: RMSNorm is one kernel on CUDA, else products in at least fp32."""
        if shape.is_cuda or self.kind == "LayerNorm":
            return shape.hidden_bytes(self.size)
        return (3 if shape.element == shape.wide else 5) * shape.own_tokens * self.size * shape.wide

    def output_again_bytes(self, shape: RankShape) -> int:
        """Return the bytes of the output that is recomputed for the backward of the linear that follows."""
        return shape.hidden_bytes(self.size) if shape.recomputes("layernorm") else 0
