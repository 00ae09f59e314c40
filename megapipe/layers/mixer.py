"""`MixerTable`: the branch of a token mixer of an extension, from what its module declares (`model.mixer.Mixer`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megapipe.layers.branch import Branch
from megapipe.sharding.spec import ParamSpec


@dataclass(frozen=True)
class Declared:
    """The declarations of a mixer's module, with names within it: its parameters, its own before those of linears, and
    the forward FLOPs of what is no linear, per token.
    """

    parameters: tuple[ParamSpec, ...]
    flops: float

    @property
    def linears(self) -> dict[str, ParamSpec]:
        """The weights of its linears by the names of these."""
        return {each.name.removesuffix(".weight"): each for each in self.parameters if each.matrix}

    def widths(self, tp: int) -> dict[str, int]:
        """Return the widths of its linears on one of tp ranks, for messages."""
        return {f"width of {name} / tp": own.shape[own.slicing.dim or 0] // tp for name, own in self.linears.items()}


@dataclass(frozen=True, eq=False)
class MixerTable(Branch):
    """The branch of one transformer layer with a token mixer, its norms included."""

    site = "mixer"
    recompute_modules = ("core_attn",)

    @cached_property
    def declared(self) -> Declared:
        found: Declared = self.model.mixer_kind.module.declare(self.model)
        return found

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs between its linears, per token."""
        return self.declared.flops
