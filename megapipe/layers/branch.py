"""`Branch`: the declarations of one residual branch of a layer, which others ask for instead of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from megapipe.config.layers import LayerConfig
from megapipe.layers.norm import NormTable, branch_norms
from megapipe.sharding.spec import ParamSpec


@dataclass(frozen=True, eq=False)
class Branch:
    """x + norm(part(norm(x))), with either norm or both.

    site: the field of a layer's configuration that says whether it has the branch. recompute_modules: those of
    --recompute-modules that make some of the branch again, besides layernorm.
    """

    model: LayerConfig

    site: ClassVar[str]
    norm_names: ClassVar[tuple[str, str]]
    recompute_modules: ClassVar[tuple[str, ...]]

    @cached_property
    def norms(self) -> tuple[NormTable | None, NormTable | None]:
        """The norms of the branch's input and of its output."""
        return branch_norms(self.model, *self.norm_names)

    def parameters(self, prefix: str, layer: int, sequence_parallel: bool, etp: int = 1) -> Iterator[ParamSpec]:
        """Yield the parameters of layer number `layer`, in model order. etp: ranks that share every expert."""
        before, after = self.norms
        yield from before.parameters(prefix, layer, sequence_parallel) if before is not None else ()
        yield from self.own_parameters(prefix, layer, sequence_parallel, etp)
        yield from after.parameters(prefix, layer, sequence_parallel) if after is not None else ()

    def own_parameters(self, prefix: str, layer: int, sequence_parallel: bool, etp: int) -> Iterator[ParamSpec]:
        """Yield the parameters between the norms."""
        raise NotImplementedError

    def states(self, prefix: str, layer: int) -> Iterator[ParamSpec]:
        """Yield the fp32 tensors that belong to the model but have no gradient: every rank holds them whole."""
        return iter(())

    def flops_per_token(self, seq_length: int, causal: bool) -> float:
        """Return the forward FLOPs that are not products with weights, per token."""
        return 0.0
