"""`Parts`: makes the linears, norms and core attention of a stage's layers, by the implementation that was chosen. Used by all of model/.

A linear is a module with weight and bias under these names, `slots` for their gradients, and forward(x), of the shapes in
tensor_parallel.linear; `takes_remake` says whether it can make its input again instead of keeping it. A norm is a module with
forward(x). Attention is a function; None stands for what torch has (model.core_attention).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megapipe.comm.groups import Group
from megapipe.config.model import ModelConfig
from megapipe.gpu.attention import Attention, AttentionShape
from megapipe.gpu.choose import TORCH, Kernels
from megapipe.gpu.transformer_engine import LinearWish
from megapipe.model.activation import Activation, activation
from megapipe.model.norm import Norm
from megapipe.plan.comm_chunks import WHOLE, CommChunks
from megapipe.plan.fp8 import fp8_layers
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.gemms import PLAIN_GEMMS, Gemms
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.tensor_parallel.weight_queue import WeightQueue


@dataclass(frozen=True)
class Parts:
    """For one stage on one tp rank. config: derived sizes filled in. recompute: the modules that every layer makes again."""

    config: ModelConfig
    tp: Group
    sequence_parallel: bool = False
    recompute: frozenset[str] = frozenset()
    queue: WeightQueue | None = None
    kernels: Kernels = TORCH
    chunks: CommChunks = WHOLE

    def column(
        self, layer: int, in_features: int, out_features: int, *, bias: bool, local_out_features: int | None = None
    ) -> nn.Module:
        """local_out_features: as in ColumnParallelLinear."""
        if self.kernels.layers is not None:
            rows = out_features if local_out_features is None else local_out_features * self.tp.size
            return self.kernels.layers.linear(self._wish(layer, in_features, rows, bias, "column"))
        return ColumnParallelLinear(
            in_features,
            out_features,
            bias=bias,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            queue=self.queue,
            local_out_features=local_out_features,
            gemms=self._gemms(layer),
            chunks=self.chunks,
        )

    def row(self, layer: int, in_features: int, out_features: int, *, bias: bool) -> nn.Module:
        if self.kernels.layers is not None:
            return self.kernels.layers.linear(self._wish(layer, in_features, out_features, bias, "row"))
        return RowParallelLinear(
            in_features,
            out_features,
            bias=bias,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            queue=self.queue,
            gemms=self._gemms(layer),
            chunks=self.chunks,
        )

    def norm(self, size: int) -> nn.Module:
        config = self.config
        if self.kernels.layers is not None:
            return self.kernels.layers.norm(
                config.normalization, size, config.norm_epsilon, config.layernorm_zero_centered_gamma
            )
        return Norm(config, size, self.kernels.norms.norm if self.kernels.norms is not None else None)

    def attention(self, layer: int, queries: int, scale: float) -> Attention | None:
        """queries: heads of each key/value head on this rank."""
        config = self.config
        if self.kernels.attention is None:
            return None
        assert config.kv_channels is not None
        window = None if config.window_size is None or config.window_size >= config.seq_length else config.window_size
        return self.kernels.attention.attention(
            AttentionShape(
                layer,
                queries,
                config.kv_channels,
                scale,
                window,
                config.attn_logit_softcapping,
                self.kernels.deterministic,
            )
        )

    def activation(self) -> Activation:
        return activation(self.config.activation, self.kernels.pointwise if self.kernels.compiles else None)

    def uses_fp8(self, layer: int) -> bool:
        """layer: global index."""
        return self.kernels.fp8 is not None and layer in fp8_layers(self.kernels.fp8, self.config.num_layers)

    def _gemms(self, layer: int) -> Gemms:
        if self.kernels.layers is not None or self.kernels.fp8 is None or not self.uses_fp8(layer):
            return PLAIN_GEMMS
        return Fp8Gemms(self.kernels.fp8, self.kernels.pointwise)

    def _wish(self, layer: int, in_features: int, out_features: int, bias: bool, mode: str) -> LinearWish:
        return LinearWish(
            in_features,
            out_features,
            bias,
            mode,
            self.tp,
            self.sequence_parallel,
            self.queue,
            self.kernels.splits_backward,
            self.uses_fp8(layer),
        )
