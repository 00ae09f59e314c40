"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.config.layers import LayerConfig
from megapipe.config.model import NORMALIZATIONS, ModelConfig, NormKind
from megapipe.layers.table import Backward, Kept, Operation, RankShape
from megapipe.sharding.spec import Init, Owner, ParamSpec, Replicated, Slicing


def branch_norms(model: LayerConfig, before: str, after: str) -> tuple[NormTable | None, NormTable | None]:
    """Return the norms of a residual branch's input and output, of these names, where the layer has them."""
    names = (before if model.norm_position != "after" else None, after if model.norm_position != "before" else None)
    first, last = (None if name is None else NormTable.of(model, name) for name in names)
    return first, last


def residual_stream(shape: RankShape, hidden_size: int) -> Operation:
    """Return the start of a branch without a norm: its first linear keeps the residual stream."""
    hidden = Kept("residual stream", shape.own_tokens * hidden_size, shape.element)
    return Operation(
        "residual stream", (hidden,), backward=Backward(0, 0 if shape.splits_backward else hidden.num_bytes)
    )


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

    def statistics(self, vectors: int, shape: RankShape, name: str = "norm statistics") -> tuple[Kept, ...]:
        """Return the statistics kept of so many vectors: mean and variance, or the mean square alone."""
        return (Kept(name, vectors, shape.wide),) * self.kind.statistics

    def after_branch(self, shape: RankShape, is_scaled: bool) -> Operation:
        """Return the norm at the end of a residual branch, over the output of its last linear."""
        hidden = shape.own_tokens * self.size
        keeps = (Kept("branch outputs", hidden, shape.element), *self.statistics(shape.own_tokens, shape))
        behind = shape.hidden_bytes(self.size) if is_scaled else 0
        backward = Backward(behind + self.gradient_bytes(shape), shape.hidden_bytes(self.size))
        return Operation(self.name, keeps, backward=backward)

    def operation(self, shape: RankShape, keeps_statistics: bool = True, backward: Backward | None = None) -> Operation:
        """Return the norm at the start of a residual branch: from the residual stream to the input of a linear.

        Recomputed, it runs again in the W of that linear.
        """
        hidden, is_recomputed = shape.own_tokens * self.size, shape.recomputes("layernorm")
        keeps = [Kept("residual stream", hidden, shape.element)]
        if keeps_statistics:
            keeps += self.statistics(shape.own_tokens, shape)
        if not is_recomputed:
            keeps.append(Kept("norm outputs", hidden, shape.element))
        return Operation(self.name, tuple(keeps), reads_weights_in_w=is_recomputed, backward=backward)

    def gradient_bytes(self, shape: RankShape) -> int:
        """Return what the norm's backward makes: RMSNorm is one kernel on CUDA, else products in at least fp32."""
        if self.kind.function is not None:
            return int(self.kind.backward_tensors * shape.own_tokens * self.size * shape.wide)
        if shape.is_cuda or self.kind.has_bias:
            return shape.hidden_bytes(self.size)
        return (3 if shape.element == shape.wide else 5) * shape.own_tokens * self.size * shape.wide

    def output_again_bytes(self, shape: RankShape) -> int:
        """Return the bytes of the output that is recomputed for the backward of the linear that follows."""
        return shape.hidden_bytes(self.size) if shape.recomputes("layernorm") else 0
