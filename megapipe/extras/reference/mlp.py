"""The MLP of one layer, and the activation functions."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.extras.reference.config import ReferenceConfig


class MLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x))). Gated: linear_fc1 has the rows [gate; up], then act(gate) * up."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.linear_fc1 = nn.Linear(hidden, 2 * width if config.gated else width, bias=bias)
        self.linear_fc2 = nn.Linear(width, hidden, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.linear_fc1(hidden)
        return self.linear_fc2(activated(self.config, inner))


def activated(config: ReferenceConfig, inner: Tensor) -> Tensor:
    """Return the activation of linear_fc1's output, [..., F] of [..., F or 2 F]."""
    if config.activation_function is not None:
        return config.activation_function(inner)
    function = ACTIVATIONS[config.activation]
    if not config.gated:
        return function(inner)
    gate, up = inner.chunk(2, dim=-1)
    limit = config.activation_func_clamp_value
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return function(gate) * (up + config.glu_linear_offset)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
}
