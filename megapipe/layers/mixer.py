"""`MixerTable`: the branch of a token mixer of an extension, from what its module declares (`model.mixer.Mixer`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megapipe.layers.branch import Branch
from megapipe.layers.linear import LinearTable
from megapipe.sharding.spec import ParamSpec


@dataclass(frozen=True)
class Declared:
    """The declarations of a mixer's module, with names within it: linears in the order of the forward, its parameters
    without those of linears, and the forward FLOPs of what is no linear, per token.
    """

    linears: tuple[LinearTable, ...]
    own: tuple[ParamSpec, ...]
    flops: float

    @property
    def parameters(self) -> tuple[ParamSpec, ...]:
        """All parameters."""
        return (*self.own, *(parameter for linear in self.linears for parameter in linear.parameters(0, False)))

    def widths(self, tp: int) -> dict[str, int]:
        """Return the widths of its linears on one of tp ranks, for messages."""
        cut = {own.name: own.outputs if own.slicing.dim == 0 else own.inputs for own in self.linears}
        return {f"width of {name} / tp": size // tp for name, size in cut.items()}


@dataclass(frozen=True, eq=False)
class MixerTable(Branch):
    """The branch of one transformer layer with a token mixer, its norms included."""

    site = "mixer"
    norm_names = ("input_layernorm", "post_self_attn_layernorm")
    recompute_modules = ("core_attn",)

    @cached_property
    def declared(self) -> Declared:
        found: Declared = self.model.mixer_kind.module.declare(self.model)
        return found

    def own_parameters(self, prefix: str, layer: int, sequence_parallel: bool, etp: int) -> Iterator[ParamSpec]:
        """Yield the parameters between the norms."""
        inside = f"{prefix}self_attention."
        for own in self.declared.own:
            yield replace(own, name=inside + own.name, owner=layer)
        for linear in self.declared.linears:
            yield from replace(linear, name=inside + linear.name).parameters(layer, sequence_parallel)

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs between its linears, per token."""
        return self.declared.flops
