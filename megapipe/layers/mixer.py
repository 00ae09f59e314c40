"""`Declared`: what the module of a token mixer of an extension declares (`model.mixer.Mixer`)."""

from __future__ import annotations

from dataclasses import dataclass

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
