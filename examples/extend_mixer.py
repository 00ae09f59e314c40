"""A token mixer of your own in attention's place: a state for each channel that decays from token to token.

megapipe launch --nproc-per-node 4 pretrain --extension examples/extend_mixer.py --attention-kind decay \
    --position-embedding-type none --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --num-virtual-stages-per-pipeline-rank none --pipeline-schedule zb-h1 --config configs/quickstart.yaml \
    --mock-data --vocab-size 1000 --verify-grid

Give only some layers the mixer with --layer-pattern '3 attention_kind=decay' 1 ...
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.extend import register_mixer
from megapipe.model.mixer import Mixer


def check(config: Any, layer: Any, options: dict[str, float]) -> Iterator[str]:
    if options["expand"] not in (1, 2, 3, 4):
        yield f"--attention-options expand={options['expand']:g}: a state has 1 to 4 times the hidden size; use 1"


class DecayReference(nn.Module):
    """The mixer on one process, from its equation: h_t = sum over s <= t of a^(t - s) (1 - a) value_s."""

    def __init__(self, hidden_size: int, has_biases: bool, options: dict[str, float]) -> None:
        super().__init__()
        width = int(options["expand"]) * hidden_size
        self.linear_in = nn.Linear(hidden_size, 2 * width, bias=has_biases)
        self.linear_out = nn.Linear(width, hidden_size, bias=has_biases)
        self.decay = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.linear_in(x).chunk(2, dim=-1)  # [batch, s, width]
        age = torch.arange(x.shape[1], device=x.device)[:, None] - torch.arange(x.shape[1], device=x.device)
        kept = torch.sigmoid(self.decay + 1) ** age.clamp(min=0)[:, :, None] * (age >= 0)[:, :, None]
        states = torch.einsum("tsw,bsw->btw", kept, value * (1 - torch.sigmoid(self.decay + 1)))
        return self.linear_out(torch.nn.functional.silu(gate) * states)


@register_mixer("decay", reference=DecayReference, options={"expand": 1}, check=check)
class Decay(Mixer):
    """silu(gate) h, where h_t = a h_(t-1) + (1 - a) value_t and a = sigmoid(decay + 1) is learned for each channel."""

    def __init__(self, layer: int, factory: Any) -> None:
        super().__init__(layer, factory)
        width = int(self.options["expand"]) * self.hidden_size
        self.linear_in = self.column(2 * width, parts=2)  # gate and value
        self.linear_out = self.row(width)
        self.decay = self.parameter(width)  # cut over tp like the channels
        self.flops = 4.0 * width

    def mix(self, x: Tensor, decay: Tensor) -> Tensor:
        """Return [s, b, channels of this rank] from x: [s, b, 2 x these]."""
        gate, value = x.chunk(2, dim=-1)
        a, state, states = torch.sigmoid(decay + 1), torch.zeros_like(value[0]), []
        for each in value * (1 - a):
            state = a * state + each
            states.append(state)
        return torch.nn.functional.silu(gate) * torch.stack(states)
