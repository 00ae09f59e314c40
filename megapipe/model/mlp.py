"""The MLP of one layer: linear_fc1, activation, linear_fc2. Used by `block`. Under tp a gated linear_fc1 holds [gate_r; up_r]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.model import GATED_ACTIVATIONS, ModelConfig
from megapipe.model.activation import activation
from megapipe.model.norm import Norm
from megapipe.model.recompute import Replay
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.tensor_parallel.weight_gradient import Remake
from megapipe.tensor_parallel.weight_queue import WeightQueue


class MLP(nn.Module):
    """x: [s, b, h] (a slice of s under sequence parallelism) -> the same shape."""

    def __init__(
        self, config: ModelConfig, tp: Group, *, sequence_parallel: bool, recompute: frozenset[str], queue: WeightQueue | None
    ) -> None:
        super().__init__()
        assert config.ffn_hidden_size is not None
        self.recompute = recompute
        self.activation = activation(config.activation)
        # relu keeps nothing but the output that linear_fc2 keeps too: there is nothing to save by making it again
        self.recompute_activation = "activation" in recompute and config.activation != "relu"
        hidden, ffn, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        rows = 2 * ffn if config.activation in GATED_ACTIVATIONS else ffn
        self.linear_fc1 = ColumnParallelLinear(hidden, rows, bias=bias, tp=tp, sequence_parallel=sequence_parallel, queue=queue)
        self.linear_fc2 = RowParallelLinear(ffn, hidden, bias=bias, tp=tp, sequence_parallel=sequence_parallel, queue=queue)

    def forward(self, x: Tensor, norm: Norm) -> Tensor:
        """MLP(norm(x)). The norm is an argument because it is recomputed together with linear_fc1, or not."""
        if "mlp" in self.recompute:
            return self._replayed(x, norm)
        normed = norm(x)
        middle = self.linear_fc1(normed, remake=Remake(norm.again, (x,)) if "layernorm" in self.recompute else None)
        remake: Remake | None = Remake(self._activate_again, (middle,)) if self.recompute_activation else None
        return self.linear_fc2(self.activation(middle), remake=remake)

    def _replayed(self, x: Tensor, norm: Norm) -> Tensor:
        """Makes linear_fc1, the activation and, where asked for, the norm again; linear_fc2 needs no replay, only its input."""
        with_norm = "layernorm" in self.recompute
        start = x if with_norm else norm(x)
        replay = Replay(lambda start: self.activation(self.linear_fc1(norm(start) if with_norm else start)))
        return self.linear_fc2(replay(start), remake=replay.remake(start))

    @torch.no_grad()
    def _activate_again(self, middle: Tensor) -> Tensor:
        return self.activation(middle)
