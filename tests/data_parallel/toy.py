"""Small model with odd shapes, its specs and buffers, for the tests of data_parallel and optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megapipe.comm.groups import Group, ProcessGroups, build_process_groups
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.store import Sharing
from megapipe.sharding.buffers import BufferKind, layout_buffers
from megapipe.sharding.spec import ParamSpec
from megapipe.topology import Topology


class Toy(nn.Module):
    """Model that maps tokens [n] to a scalar loss; its parameters are on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embedding = nn.Embedding(11, 7)
            self.norm = nn.LayerNorm(7)
            self.up = nn.Linear(7, 13)
            self.down = nn.Linear(13, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(self.embedding(tokens))))).square().sum()


def toy_specs() -> tuple[ParamSpec, ...]:
    """Return one spec per parameter of Toy. The embedding uses the decoupled learning rate, vectors no weight decay."""
    return tuple(
        ParamSpec(
            name,
            tuple(parameter.shape),
            owner=0,
            weight_decay=parameter.ndim > 1,
            decoupled_lr=name.startswith("embedding"),
        )
        for name, parameter in Toy().named_parameters()
    )


def draw(spec: ParamSpec) -> Tensor:
    """Draw a whole initial tensor in fp64 from the parameter's name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
    return torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 0.3


def stage_buffers(
    specs: Sequence[ParamSpec],
    sharing: Sharing = Sharing(),  # noqa: B008
    bucket_size: int = 60,
    *,
    tied_kind: BufferKind = "plain",
    param_dtype: torch.dtype = torch.float64,
    grad_dtype: torch.dtype = torch.float64,
) -> StageBuffers:
    layouts = layout_buffers(specs, *sharing.cut, sharing.shards.size, bucket_size, tied_kind)
    return StageBuffers(layouts, "cpu", param_dtype, grad_dtype, sharing=sharing)


def shard_of(rank: int, num_shards: int, cut: tuple[int, int] = (0, 1)) -> Sharing:
    """Return how one of several ranks shares its parameters, without a backend."""
    return Sharing(int(num_shards > 1), Group("shards", tuple(range(num_shards)), rank), cut=cut)


def groups_of(rank: int, **axes: int) -> ProcessGroups:
    return build_process_groups(Topology(**axes), rank, "gloo", 30.0)


def tokens_of(step: int, microbatch: int) -> Tensor:
    """Return the tokens of one microbatch, numbered over all dp ranks."""
    return torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(1000 * step + microbatch))
