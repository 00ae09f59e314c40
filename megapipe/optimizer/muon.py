"""Muon over flat shards (Jordan et al. 2024): whole matrices of hidden layers by Newton-Schulz, the rest by AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.comm.collectives import all_to_all
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.config.rules.optimizer import rule_options
from megapipe.config.training import NEWTON_SCHULZ, OPTIMIZERS, OptimizerConfig, UpdateStep
from megapipe.errors import ConfigError
from megapipe.optimizer.schedule import Rates
from megapipe.optimizer.shards import Shard
from megapipe.optimizer.update_rule import Rule, UpdateRule
from megapipe.sharding.matrices import OwnedMatrix, muon_scale, share_out

EPS = 1e-7  # least norm that a matrix is divided by: a matrix of zeros stays zero


@dataclass(frozen=True, eq=False)
class _Grid:
    """The matrices of which this rank holds a part: those of dense layers, or of experts.

    replicas: share out the optimizer state, if num_shards is above 1. columns: the ranks that each hold a slice of the
    same matrices, at places first, first + 1, ... of the `ranks` that cut the parameters.
    """

    replicas: Group
    columns: Group
    num_shards: int
    first: int
    ranks: int
    matrices: tuple[tuple[Shard, OwnedMatrix], ...]

    def held(self, matrices: Sequence[tuple[Shard, OwnedMatrix]]) -> Sequence[tuple[Shard, OwnedMatrix]]:
        """Return the matrices whose owner is this rank, or cuts parameters with it."""
        return [pair for pair in matrices if pair[1].replica == self.replicas.rank]

    def shards_and_slices(
        self,
        matrices: Sequence[tuple[Shard, OwnedMatrix]],
        updates: dict[int, Tensor],
        held: dict[OwnedMatrix, Tensor],
        collects: bool,
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return, by replica, the parts of this rank's shards that belong to each, and the places of all shards' parts
        in the slices that it holds. collects: where every shard has all, only the owner's.
        """
        shards: list[list[Tensor]] = [[] for _ in self.replicas.ranks]
        slices: list[list[Tensor]] = [[] for _ in self.replicas.ranks]
        for shard, matrix in matrices:
            for replica in range(self.replicas.size):
                if collects and self.num_shards == 1 and replica != matrix.replica:
                    continue
                is_mine, is_held = replica == self.replicas.rank, matrix in held
                for part in matrix.parts(replica, self.num_shards) if is_mine or is_held else ():
                    if is_mine:
                        start = part.start - shard.start
                        shards[matrix.replica].append(updates[id(shard)][start : start + part.numel])
                    if is_held:
                        slices[replica].append(held[matrix].view(-1)[part.at : part.at + part.numel])
        return shards, slices

    def slices_and_matrices(
        self, held: dict[OwnedMatrix, Tensor], whole: dict[OwnedMatrix, Tensor], collects: bool
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return, by column, the rows of this rank's slices that belong to each, and the places of all slices' rows in
        the matrices that it owns. collects: of rows that several ranks hold, the owner's, else those of the first.
        """
        slices: list[list[Tensor]] = [[] for _ in self.columns.ranks]
        parts: list[list[Tensor]] = [[] for _ in self.columns.ranks]
        for matrix, values in held.items():
            owner = self.first + matrix.column
            for column in range(self.columns.size):
                is_mine, rank, first = column == self.columns.rank, self.first + column, 0
                columns = matrix.matrix.columns(rank, self.ranks)
                for rows in matrix.matrix.local_rows(rank, self.ranks) if is_mine or matrix in whole else ():
                    sends = rank == (owner if owner in rows.holders else rows.holders[0])
                    if is_mine and (sends or not collects):
                        slices[matrix.column].append(values[first : first + rows.count])
                    if matrix in whole and (sends or not collects):
                        place = whole[matrix][rows.at : rows.at + rows.count, columns.start : columns.stop]
                        parts[column].append(place)
                    first += rows.count
        return slices, parts


class Muon(Rule):
    """The rule of --optimizer muon, or of an extension over whole matrices.

    The momentum is a running mean of the clipped gradient. Each matrix of momentum (with muon_nesterov: of its mean
    with the gradient) is brought to its owner (sharding.matrices), orthogonalized in at least fp32, and returned to the
    shards, where weights decay as with AdamW. groups: the ranks that cut parameters. device: of the
    computation, which is not that of the state with --optimizer-cpu-offload.
    """

    def __init__(
        self, config: OptimizerConfig, shards: Sequence[Shard], groups: ProcessGroups, device: torch.device
    ) -> None:
        self._config, self._device = config, device
        self._kind, self._options = OPTIMIZERS[config.optimizer], rule_options(config)
        self._momentum = self._options["momentum"] if self._kind.direction is not None else config.muon_momentum
        self._rest = UpdateRule(config, [shard for shard in shards if not shard.bucket.has_matrices])
        self._shards = [shard for shard in shards if shard.bucket.has_matrices]
        self._grids = [grid for kind in (False, True) if (grid := self._grid(groups, kind)).matrices]

    def _grid(self, groups: ProcessGroups, is_expert: bool) -> _Grid:
        config, cut = self._config, groups.cut_of(is_expert)
        columns = groups.etp if is_expert else groups.tp
        shards = [shard for shard in self._shards if shard.layout.is_expert == is_expert]
        num_shards, replicas = 1, Group.alone("replicas")
        if shards:
            num_shards, replicas = shards[0].layout.num_shards, shards[0].store.sharing.reducers
        buckets = [shard.bucket for shard in shards]
        owned = share_out(
            buckets, cut, replicas.size, columns.size, config.muon_num_ns_steps, not config.muon_no_split_qkv
        )
        # buckets of two stages may be equal, but not the same object
        by_bucket = {id(shard.bucket): shard for shard in shards}
        matrices = tuple((by_bucket[id(matrix.bucket)], matrix) for matrix in owned)
        return _Grid(replicas, columns, num_shards, cut[0] - columns.rank, cut[1], matrices)

    def set_num_steps(self, num_steps: int) -> None:
        """Continue as after num_steps updates."""
        self.num_steps = num_steps
        self._rest.set_num_steps(num_steps)

    def step(self, factor: float, rates: Rates) -> None:
        """Update the master weights with gradient x factor; the gradients hold the product afterwards. Called by all
        ranks that hold parts of the same stages.
        """
        self.num_steps += 1
        self._rest.step(factor, rates)
        updates: dict[int, Tensor] = {}  # by id of the shard: its part of the matrices, replaced by the result
        for shard in self._shards:
            gradient, momentum = shard.updated_from, shard.moments["momentum"]
            if factor != 1.0:
                gradient.mul_(factor)
            momentum.lerp_(gradient, 1 - self._momentum)
            start = momentum
            if self._kind.direction is None and self._config.muon_nesterov:
                start = gradient.lerp(momentum, self._momentum)
            updates[id(shard)] = start.to(self._device, copy=start is momentum)
        with _matmul_precision(self._config.muon_fp32_matmul_prec, self._device):
            for grid in self._grids:
                is_alone = grid.replicas.size == grid.columns.size == 1  # then one by one, which needs less memory
                for matrices in ([one] for one in grid.matrices) if is_alone else [grid.matrices]:
                    self._replace(grid, matrices, updates, rates)
        for shard in self._shards:
            master = shard.master.detach()
            master.mul_(1 - rates.lr * rates.weight_decay)
            master.add_(updates[id(shard)].to(master.device), alpha=-rates.lr)

    def _replace(
        self, grid: _Grid, matrices: Sequence[tuple[Shard, OwnedMatrix]], updates: dict[int, Tensor], rates: Rates
    ) -> None:
        """Replace the parts of these matrices in `updates` by what is subtracted from the weights, before lr."""
        like = next(iter(updates.values()))
        held = {matrix: like.new_empty(matrix.local_shape) for _, matrix in grid.held(matrices)}
        whole = {matrix: like.new_empty(matrix.matrix.shape) for matrix in held if matrix.column == grid.columns.rank}
        _exchange(*grid.shards_and_slices(matrices, updates, held, collects=True), grid.replicas, like)
        _exchange(*grid.slices_and_matrices(held, whole, collects=True), grid.columns, like)
        for matrix, values in whole.items():
            # as [outputs, inputs]
            values = values if matrix.matrix.spec.matrix == "outputs x inputs" else values.T
            values.copy_(self._direction(values, rates))
        slices, parts = grid.slices_and_matrices(held, whole, collects=False)
        _exchange(parts, slices, grid.columns, like)
        shards, slices = grid.shards_and_slices(matrices, updates, held, collects=False)
        _exchange(slices, shards, grid.replicas, like)

    def _direction(self, matrix: Tensor, rates: Rates) -> Tensor:
        """Return the update of a matrix [outputs, inputs] of momentum."""
        config = self._config
        if self._kind.direction is not None:
            step = UpdateStep(self.num_steps, rates.lr, rates.weight_decay, self._options)
            found = self._kind.direction(matrix, step)
            if not isinstance(found, Tensor) or found.shape != matrix.shape:
                shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ConfigError(
                    f"update rule {config.optimizer!r} returned {shape} for a matrix of shape {list(matrix.shape)}; "
                    "return a tensor of that shape"
                )
            return found
        scale = muon_scale(matrix.shape, config.muon_scale_mode) * config.muon_extra_scale_factor
        coefficients = NEWTON_SCHULZ[config.muon_coefficient_type]
        return orthogonalized(matrix, coefficients, config.muon_num_ns_steps).mul_(scale)


def orthogonalized(matrix: Tensor, coefficients: Sequence[tuple[float, float, float]], steps: int) -> Tensor:
    """Return the matrix [m, n] with its singular values brought near 1 by Newton-Schulz, in at least fp32."""
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=EPS)
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _exchange(sent: list[list[Tensor]], received: list[list[Tensor]], group: Group, like: Tensor) -> None:
    """Copy tensors to those of the group's ranks. sent, received: by rank, views with the same elements in order."""
    if group.size == 1:
        for source, target in zip(sent[0], received[0], strict=True):
            target.copy_(source.view_as(target))
        return
    rows_in, rows_out = ([sum(one.numel() for one in peer) for peer in side] for side in (sent, received))
    packed, arrived = like.new_empty(sum(rows_in)), like.new_empty(sum(rows_out))
    sources = [one for peer in sent for one in peer]
    # torch.cat would copy columns of matrices once more
    for source, place in zip(sources, packed.split([one.numel() for one in sources]), strict=True):
        place.view_as(source).copy_(source)
    all_to_all(arrived, packed, rows_out, rows_in, group)
    targets = [one for peer in received for one in peer]
    for source, target in zip(arrived.split([one.numel() for one in targets]), targets, strict=True):
        target.copy_(source.view_as(target))


@contextmanager
def _matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Set the precision of products in fp32 on a GPU for a while; on a CPU they stay in fp32."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
