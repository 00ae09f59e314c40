"""Plain modules as pipeline stages, with a different width at every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.comm.channels import MessageSpec
from megapipe.comm.groups import Group, build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.topology import Topology

ROWS = 5
Payload = dict[str, Tensor]


class Plain(nn.Module):
    """A stage [rows, 3 + stage] -> [rows, 4 + stage].

    With `tuples` it also takes and returns a factor per row, which is trained, and integers, which are only passed on.
    """

    def __init__(self, stage: int, tuples: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + stage)
        self.stage, self.tuples = stage, tuples
        self.weight = nn.Parameter(torch.randn(4 + stage, 3 + stage, generator=generator, dtype=torch.float64))
        self.gain = nn.Parameter(torch.randn(ROWS, generator=generator, dtype=torch.float64))

    def forward(self, *inputs: Any) -> Any:
        *hidden, payload = inputs
        x = hidden[0] if hidden else payload["x"]
        x = torch.tanh(x @ self.weight.t())
        if not self.tuples:
            return x * self.gain[:, None]
        factor, numbers = hidden[1:] if hidden else (payload["factor"], payload["numbers"])
        return x * factor[:, None], factor * self.gain, numbers + 1


def message(boundary: int, tuples: bool) -> tuple[MessageSpec, ...]:
    x = MessageSpec((ROWS, 4 + boundary), torch.float64)
    return (x, MessageSpec((ROWS,), torch.float64), MessageSpec((ROWS,), torch.int64)) if tuples else (x,)


def payloads(count: int) -> list[Payload]:
    made = []
    for k in range(count):
        generator = torch.Generator().manual_seed(k)
        x, factor = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((ROWS, 3), (ROWS,)))
        made.append({"x": x, "factor": factor, "numbers": torch.arange(ROWS) + k})
    return made


def loss_of(output: Any, payload: Payload) -> Tensor:
    """Return the loss; it depends on the integers, which count stages, so a misrouted message changes it."""
    if isinstance(output, Tensor):
        return (output * payload["factor"][:, None]).square().sum()
    x, factor, numbers = output
    return (x.square().sum(1) * numbers).sum() + factor.sum()


def gradients(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]


def pp_group(rank: int, world_size: int, timeout_seconds: float = 30.0, tracer: Tracer | None = None) -> Group:
    return build_process_groups(Topology(pp=world_size), rank, "gloo", timeout_seconds, tracer).pp


def merged(results: Sequence[tuple[Any, dict[int, Any]]]) -> dict[int, Any]:
    """Merge the ranks' results by stage."""
    return {stage: value for _, by_stage in results for stage, value in by_stage.items()}
