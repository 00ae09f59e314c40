"""The MLP of one layer: linear_fc1, activation, linear_fc2. Used by `block`. Under tp a gated linear_fc1 holds [gate_r; up_r]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.config.model import GATED_ACTIVATIONS
from megapipe.model.norm import again
from megapipe.model.parts import Parts
from megapipe.model.recompute import Replay, remaking
from megapipe.tensor_parallel.weight_gradient import Remake


class MLP(nn.Module):
    """x: [s, b, h] (a slice of s under sequence parallelism) -> the same shape."""

    def __init__(self, layer: int, parts: Parts) -> None:
        super().__init__()
        config, recompute = parts.config, parts.recompute
        assert config.ffn_hidden_size is not None
        self.recompute = recompute
        self.activation = parts.activation()
        # relu keeps nothing but the output that linear_fc2 keeps too: there is nothing to save by making it again
        self.recompute_activation = "activation" in recompute and config.activation != "relu"
        hidden, ffn, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        rows = 2 * ffn if config.activation in GATED_ACTIVATIONS else ffn
        self.linear_fc1 = parts.column(layer, hidden, rows, bias=bias)
        self.linear_fc2 = parts.row(layer, ffn, hidden, bias=bias)

    def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
        """MLP(norm(x)). The norm is an argument because it is recomputed together with linear_fc1, or not."""
        if "mlp" in self.recompute:
            return self._replayed(x, norm)
        normed = norm(x)
        middle = self.linear_fc1(
            normed, *remaking(Remake(again(norm), (x,)) if "layernorm" in self.recompute else None)
        )
        remake: Remake | None = Remake(self._activate_again, (middle,)) if self.recompute_activation else None
        return self.linear_fc2(self.activation(middle), *remaking(remake))

    def _replayed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Makes linear_fc1, the activation and, where asked for, the norm again; linear_fc2 needs no replay, only its input."""
        with_norm = "layernorm" in self.recompute
        start = x if with_norm else norm(x)
        replay = Replay(lambda start: self.activation(self.linear_fc1(norm(start) if with_norm else start)))
        return replay.into(self.linear_fc2, start)

    @torch.no_grad()
    def _activate_again(self, middle: Tensor) -> Tensor:
        return self.activation(middle)
