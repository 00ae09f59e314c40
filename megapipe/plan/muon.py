"""The work that --optimizer muon adds to a step: products, exchanged matrices and the memory of both.

Rules of extensions over whole matrices are planned like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from megapipe.config.training import OPTIMIZERS, OptimizerConfig
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.buffers import Bucket
from megapipe.sharding.matrices import share_out


@dataclass(frozen=True)
class MuonWork:
    """One update of the ranks of a pp_rank.

    flops: of Newton-Schulz on the rank with the most. sent: elements that a rank sends, the mean over the ranks, by
    group. temporary_elements: that the rank with the most makes and frees besides a copy of its shard: slices and whole
    matrices that it owns, and on top the most of a packed exchange of either and of Newton-Schulz.
    """

    flops: int = 0
    sent: Mapping[str, float] = field(default_factory=dict)
    temporary_elements: int = 0


def muon_work(plan: RunPlan, pp_rank: int) -> MuonWork:
    """Return the work of an update; nothing without Muon."""
    optimizer, topology = plan.config.optimizer, plan.topology
    if OPTIMIZERS[optimizer.optimizer].matrix_states is None:
        return MuonWork()
    layouts = plan.trained_buffers(plan.placement.stages_of(pp_rank))
    flops, temporary = 0, 0
    sent: dict[str, float] = {}
    for is_expert, group, columns in ((False, "tp", topology.tp), (True, "etp", topology.etp)):
        held = [layout for layout in layouts if layout.is_expert == is_expert]
        buckets = tuple(bucket for layout in held for bucket in layout.buckets if bucket.has_matrices)
        num_shards = max((layout.num_shards for layout in held), default=1)
        ranks = topology.ep * topology.etp if is_expert else columns
        # each instance has all matrices; what has one shard is shared out over all replicas
        replicas, name = topology.sharing(is_expert)[0], topology.shard_group(is_expert)
        if replicas == 1:
            replicas, name = topology.sharing(is_expert)[1], "expert_instances" if is_expert else "instances"
        grid = _grid_work(buckets, ranks, replicas, columns, num_shards, optimizer)
        flops, temporary = flops + grid.flops, max(temporary, grid.temporary_elements)
        sent |= {name: grid.sent.get("replicas", 0.0), group: grid.sent.get("columns", 0.0)}
    return MuonWork(flops, sent, temporary)


@lru_cache(maxsize=64)
def _grid_work(
    buckets: tuple[Bucket, ...], ranks: int, replicas: int, columns: int, num_shards: int, optimizer: OptimizerConfig
) -> MuonWork:
    steps, work = optimizer.muon_num_ns_steps, Counter[tuple[int, int]]()
    held, whole, own = Counter[tuple[int, int]](), Counter[tuple[int, int]](), Counter[tuple[int, int]]()  # elements
    sent, largest, widest = Counter[str](), 0, 0
    for column in range(columns):
        for matrix in share_out(buckets, (column, ranks), replicas, columns, steps, not optimizer.muon_no_split_qkv):
            owner, elements = (matrix.replica, matrix.column), matrix.local_shape[0] * matrix.local_shape[1]
            held[matrix.replica, column] += elements
            if column == matrix.column:
                rows, width = matrix.matrix.shape
                work[owner] += matrix.matrix.flops(steps)
                whole[owner] += rows * width
                widest = max(widest, rows * width)
                # the matrix of two steps and two products of its smaller side
                largest = max(largest, 2 * rows * width + 2 * min(rows, width) ** 2)
            for replica in range(replicas):
                part = sum(part.numel for part in matrix.parts(replica, num_shards))
                own[replica, column] += part
                if replica != matrix.replica:
                    sent["replicas"] += part if num_shards == 1 else 2 * part
            if column != matrix.column:
                sent["columns"] += elements
                for piece in matrix.rows:  # the owner holds some itself; others come from the first rank that has them
                    source = matrix.column if matrix.column in piece.holders else piece.holders[0]
                    sent["columns"] += piece.count * matrix.local_shape[1] if column == source else 0
    places = replicas * columns
    if places == 1:  # one matrix at a time, its slice and itself
        return MuonWork(work[0, 0], {}, 2 * widest + largest)
    most = 0
    for place, slices in held.items():
        packed = slices + whole[place] if columns > 1 else 0
        if replicas > 1:  # the result goes to every replica that has no shard, to their shards else
            packed = max(packed, own[place] + slices * (replicas if num_shards == 1 else 1))
        most = max(most, slices + whole[place] + max(packed, largest))
    mean = {name: count / places for name, count in sent.items()}
    return MuonWork(max(work.values(), default=0), mean, most)
