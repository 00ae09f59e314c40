"""The MLP of one layer, and the activation functions."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.extras.reference.config import ReferenceConfig


class MLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x))). Gated: linear_fc1 has the rows [gate; up], then act(gate) * up."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.gated, self.function = config.gated, config.activation_function
        self.activation = ACTIVATIONS[config.activation] if self.function is None else self.function
        hidden, width, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.linear_fc1 = nn.Linear(hidden, 2 * width if config.gated else width, bias=bias)
        self.linear_fc2 = nn.Linear(width, hidden, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.linear_fc1(hidden)
        if self.gated and self.function is None:
            gate, up = inner.chunk(2, dim=-1)
            return self.linear_fc2(self.activation(gate) * up)
        return self.linear_fc2(self.activation(inner))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
}
