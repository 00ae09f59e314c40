"""The dense MLP: x + norm(fc2(activation(fc1(norm(x))))), with either norm or both, gated (SwiGLU, GeGLU) or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.config.model import ACTIVATIONS, ActivationKind
from megapipe.layers.branch import Branch
from megapipe.layers.linear import LinearTable, output_std
from megapipe.sharding.spec import Fused, ParamSpec


@dataclass(frozen=True, eq=False)
class MLPTable(Branch):
    """The MLP branch of one transformer layer, its norms included."""

    site = "has_mlp"
    norm_names = ("pre_mlp_layernorm", "post_mlp_layernorm")
    recompute_modules = ("mlp", "activation")

    @property
    def activation(self) -> ActivationKind:
        """The row of its activation."""
        return ACTIVATIONS[self.model.activation]

    @property
    def gates(self) -> int:
        """2 where linear_fc1 makes gate and up, else 1."""
        return 2 if self.activation.is_gated else 1

    def own_parameters(self, prefix: str, layer: int, sequence_parallel: bool, etp: int) -> Iterator[ParamSpec]:
        """Yield the parameters between the norms."""
        model, hidden, gates, name = self.model, self.model.hidden_size, self.gates, f"{prefix}mlp"
        ffn, has_bias, std = model.ffn_hidden_size, model.add_bias_linear, model.init_method_std
        fc1 = LinearTable(f"{name}.linear_fc1", gates * ffn, hidden, Fused(0, gates), has_bias, std)
        fc2 = LinearTable(f"{name}.linear_fc2", hidden, ffn, Fused(1), has_bias, output_std(model))
        yield from fc1.parameters(layer, sequence_parallel)
        yield from fc2.parameters(layer, sequence_parallel)
