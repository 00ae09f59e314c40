"""`LayerFactory`: builds the linears, norms and attention of a stage's layers from the chosen kernels.

A linear is a module with `weight`, `bias`, `slots` for their gradients, and forward(x, recompute=None) with the
shapes of tensor_parallel.linear; `can_recompute_input` (True unless set) says whether it can recompute its input
instead of saving it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from megapipe.comm.groups import ExpertGroups, Group
from megapipe.config.layers import LayerConfig
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.gpu.kernels import Kernels
from megapipe.gpu.libraries import AttentionKernel, AttentionShape
from megapipe.layers.linear import fp8_layers
from megapipe.layers.table import CommChunks
from megapipe.model.context_parallel import ContextParallel
from megapipe.model.norm import Norm, ProjectionNorm
from megapipe.sharding.spec import Fused, Init, ParamSpec, Slicing
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.gemms import PLAIN_GEMMS, Gemms
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


def output_std(model: ModelConfig) -> float:
    """Return the standard deviation of the initial weights of the last linear of each residual branch."""
    return model.init_method_std / math.sqrt(2 * model.num_layers)


@dataclass(frozen=True)
class LayerFactory:
    """Builds what one layer of a stage is made of, on one tp rank. recompute: modules that the layer recomputes."""

    config: LayerConfig
    tp: Group
    sequence_parallel: bool
    recompute: frozenset[str]
    queue: WeightQueue
    kernels: Kernels
    chunks: CommChunks
    experts: ExpertGroups = field(default_factory=ExpertGroups)
    context: ContextParallel | None = None  # with several cp ranks

    def of(
        self, config: LayerConfig, recompute: frozenset[str], context: ContextParallel | None = None
    ) -> LayerFactory:
        """Return the factory of a layer with this configuration, recompute and context parallelism."""
        return replace(self, config=config, recompute=recompute, context=context)

    def linear(
        self,
        kind: Literal["column", "row"],
        layer: int,
        in_features: int,
        out_features: int,
        bias: bool,
        slicing: Slicing | None = None,
    ) -> nn.Module:
        """Build a column- or row-parallel linear. slicing: how tp cuts its weight, evenly by default."""
        config, library, is_column = self.config, self.kernels.layers, kind == "column"
        std = config.init_method_std if is_column else output_std(config)
        shape, slicing = (out_features, in_features), slicing or Fused(0 if is_column else 1)
        weight = ParamSpec("", shape, 0, slicing, Init("normal", std), matrix="outputs x inputs")
        common: dict[str, Any] = {
            "bias": bias,
            "tp": self.tp,
            "sequence_parallel": self.sequence_parallel,
            "queue": self.queue,
        }
        if library is not None:
            tp = self.tp
            rows = weight.local_shape(tp.rank, tp.size)[0] * tp.size if is_column else out_features
            common |= {"splits_backward": self.kernels.splits_backward, "uses_fp8": self._fp8(layer) is not None}
            return library.linear(kind, in_features, rows, **common)
        common |= {"gemms": self.gemms(layer), "chunks": self.chunks, "sm_carveout": self.kernels.sm_carveout}
        make = ColumnParallelLinear if kind == "column" else RowParallelLinear
        return make(in_features, out_features, **common, weight=weight)

    def gemms(self, layer: int, num_matrices: int = 1) -> Gemms:
        """Return the GEMMs of one linear of a layer, in 8 bits or not. num_matrices: in its weight, one an expert."""
        fp8 = self._fp8(layer)
        return PLAIN_GEMMS if fp8 is None else Fp8Gemms(fp8, self.kernels.cast, num_matrices)

    def _fp8(self, layer: int) -> PrecisionConfig | None:
        """Return the settings of fp8 in a layer, None without it; modules of multi-token prediction are as the last."""
        fp8, last = self.kernels.fp8, self.config.num_layers - 1
        return None if fp8 is None or min(layer, last) not in fp8_layers(fp8, last + 1) else fp8

    def replicated_linear(self, layer: int, in_features: int, out_features: int) -> nn.Module:
        """Build a linear without bias that every tp rank holds whole, over this rank's tokens: [s, b, in] (a slice of s
        with sequence parallelism, so that its gradient is partial) -> [s, b, out].
        """
        alone, gemms = Group.alone("tp", self.tp.global_rank), self.gemms(layer)
        weight = ParamSpec(
            "",
            (out_features, in_features),
            0,
            init=Init("normal", self.config.init_method_std),
            partial_gradient=self.sequence_parallel,
            matrix="outputs x inputs",
        )
        return ColumnParallelLinear(
            in_features,
            out_features,
            bias=False,
            tp=alone,
            sequence_parallel=False,
            queue=self.queue,
            weight=weight,
            gemms=gemms,
        )

    def norm(self, size: int, epsilon: float | None = None, partial_gradient: bool | None = None) -> nn.Module:
        """Build a norm over the last dim. epsilon: instead of the model's. partial_gradient: each tp rank normalizes
        something else; by default with sequence parallelism, other tokens.
        """
        config, kernels = self.config, self.kernels
        if epsilon is not None:
            config = replace(config, norm_epsilon=epsilon)
        if kernels.layers is not None:
            return kernels.layers.norm(
                config.normalization, size, config.norm_epsilon, config.layernorm_zero_centered_gamma
            )
        is_partial = self.sequence_parallel if partial_gradient is None else partial_gradient
        return Norm(config, size, kernels.norms.norm if kernels.norms is not None else None, is_partial)

    def qk_norm(self, heads: int) -> nn.Module:
        """Build the norm of q or k, so many heads of the model: [s, b, groups, heads, head_dim] -> the same."""
        if self.config.qk_layernorm_scope == "projection":
            return ProjectionNorm(self.config, heads, self.tp)
        # one weight for all heads, of which each tp rank sees its own
        return self.norm(self.config.kv_channels, partial_gradient=True)

    def branch_norms(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Build the norms of the input and of the output of a residual branch."""
        position, size = self.config.norm_position, self.config.hidden_size
        before = self.norm(size) if position != "after" else None
        return before, self.norm(size) if position != "before" else None

    def attention(self, layer: int, queries: int, scale: float) -> AttentionKernel | None:
        """Build a library's attention kernel; None for torch's. queries: heads per key/value head on this rank."""
        config, kernels = self.config, self.kernels
        if kernels.attention is None:
            return None
        cap, deterministic = config.attn_logit_softcapping, kernels.deterministic
        shape = AttentionShape(layer, queries, config.kv_channels, scale, config.window, cap, deterministic)
        return kernels.attention.attention(shape)
