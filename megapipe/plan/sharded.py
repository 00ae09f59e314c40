"""Sharded gradients and weights over a step: what a rank gathers, reduces and holds whole at each action of its row.

`row_bytes` walks a row as `data_parallel.stores` runs it; memory, traffic and `megapipe plan` fold over it. With d
shards, weights of e bytes and gradients of g, ZeRO-2 keeps e + g / d bytes of a parameter and ZeRO-3 (e + g) / d, and
the optimizer its state of a shard. What is whole at a time comes on top: weights from UNSHARD to RESHARD, and gradients
from the first backward after a reduction until the next reduction of the rank starts, which waits for the one before;
without --overlap-grad-reduce until their own has ended.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megapipe.layers.table import ALL_REDUCE, ring_bytes
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import BACKWARD_OPS, Action, Op
from megapipe.schedule.schedule import Row
from megapipe.sharding.buffers import BufferLayout

BF16_BYTES = 2


class Whole(NamedTuple):
    """Bytes that exist while an action runs: of gathered weights, and of whole gradients, with copies to send."""

    weights: int = 0
    gradients: int = 0

    def items(self) -> dict[str, int]:
        """Return the bytes by the names of `plan.memory`."""
        return {"gathered weights": self.weights, "whole gradients": self.gradients}


NOTHING = Whole()


Buffer = tuple[int, int]  # a flat buffer of a rank: its stage, and its index among those of the stage


class RowBytes:
    """Bytes and elements that one row of sharded gradients, or weights too, moves and holds: the same steps as `Stores`
    takes, with the buffers of a rank.

    whole: at each action. gathers, reductions: UNSHARD and REDUCE_GRAD actions. gathered_by_kind, reduced_by_kind:
    elements of the buffers that they gather and reduce, False dense ones, True those of experts.
    """

    def __init__(self, plan: RunPlan, pp_rank: int, row: Row) -> None:
        stages = plan.placement.stages_of(pp_rank)
        self.layouts: dict[Buffer, BufferLayout] = {
            (stage, number): layout
            for stage in stages
            for number, layout in enumerate(plan.buffers(stage, 0))
            if layout.num_shards > 1
        }
        self.own = {stage: [buffer for buffer in self.layouts if buffer[0] == stage] for stage in stages}
        # of a tied embedding that two stages of the rank use
        self.shared = [buffer for buffer, layout in self.layouts.items() if layout.kind == "shared"]
        self.used = {
            stage: [*self.own[stage], *(self.shared if plan.borrows_embedding(stage) else ())] for stage in stages
        }
        self.trained = {
            stage: [buffer for buffer in used if self.layouts[buffer].trainable] for stage, used in self.used.items()
        }
        self.element, self.gradient = plan.shape.element, plan.state_dtypes.gradient_bytes
        self.overlaps = plan.config.parallel.overlap_grad_reduce
        self.in_bf16 = plan.config.parallel.grad_reduce_in_bf16 and self.gradient > BF16_BYTES
        self.users: Counter[Buffer] = Counter()  # gathered stages that use a buffer
        self.open: dict[Buffer, int] = {}  # bytes of whole gradients
        self.in_flight: dict[Buffer, int] = {}  # of those that are being reduced, or of their copies
        self.finished: set[int] = set()  # stages
        self.gathered_by_kind: Counter[bool] = Counter()
        self.reduced_by_kind: Counter[bool] = Counter()
        self.now = NOTHING
        self.whole = tuple(map(self._step, row))
        ran = Counter(op for _, op, _ in row)
        self.gathers, self.reductions = ran[Op.UNSHARD], ran[Op.REDUCE_GRAD]

    @property
    def gathered(self) -> int:
        """Elements of all buffers that are gathered."""
        return self.gathered_by_kind.total()

    @property
    def reduced(self) -> int:
        """Elements of all buffers that are reduced."""
        return self.reduced_by_kind.total()

    @property
    def peak(self) -> Whole:
        """The most bytes of each kind, not necessarily at the same time."""
        return Whole(*map(max, zip(*self.whole, strict=True))) if self.whole else NOTHING

    def _step(self, action: Action) -> Whole:
        """Run an action and return what is whole meanwhile."""
        stage, op, microbatch = action
        copies = 0
        if op is Op.UNSHARD:
            for layout in (self.layouts[each] for each in self.used[stage] if not self.users[each]):
                self.gathered_by_kind[layout.is_expert] += layout.numel
            self.users.update(self.used[stage])
        elif op is Op.RESHARD:
            self.users.subtract(self.used[stage])
        elif op in BACKWARD_OPS and any(buffer not in self.open for buffer in self.trained[stage]):
            # copies in bf16 stay until the next reduction
            if not self.in_bf16 and any(buffer in self.in_flight for buffer in self.trained[stage]):
                self.in_flight.clear()
            self.open.update({buffer: self.layouts[buffer].numel * self.gradient for buffer in self.trained[stage]})
        elif op is Op.REDUCE_GRAD:
            copies = self._reduce(stage, is_last=microbatch is None)
        else:
            return self.now
        weights = sum(self.layouts[buffer].numel for buffer, users in self.users.items() if users) * self.element
        reducing, kept = sum(self.in_flight.values()), sum(self.open.values())
        if not self.overlaps:
            self.in_flight.clear()
        self.now = Whole(weights, kept + sum(self.in_flight.values()))
        return Whole(weights, kept + reducing + copies)

    def _reduce(self, stage: int, is_last: bool) -> int:
        """Start a reduction; return the bytes of gradients that are freed once their bf16 copies are made."""
        self.finished |= {stage} if is_last else set()
        takes_shared = len(self.finished) == len(self.own) if is_last else stage == 0
        buffers = [buffer for buffer in self.own[stage] if buffer not in self.shared]
        self.in_flight.clear()
        freed = 0
        for buffer in [*buffers, *(self.shared if takes_shared else ())]:
            size, layout = self.open.pop(buffer, 0), self.layouts[buffer]
            if size:
                self.reduced_by_kind[layout.is_expert] += layout.numel
                self.in_flight[buffer] = layout.numel * BF16_BYTES if self.in_bf16 else size
                freed += size * self.in_bf16
        return freed


def row_bytes(plan: RunPlan, pp_rank: int, row: Row) -> RowBytes:
    """Return what a row with sharded gradients gathers, reduces and holds. The plan has a strategy of sharding."""
    return RowBytes(plan, pp_rank, row)


def replica_bytes(plan: RunPlan, pp_rank: int, row: Row) -> dict[str, float]:
    """Return the bytes that a rank sends to its replicas in a step with sharded gradients, by group.

    Rings over d ranks: (d - 1) / d of the gathered weights and of the reduced gradients. With several instances (HSDP)
    the shards of gradients are summed over them at the end of the step.
    """
    parallel, topology, row_moves = plan.config.parallel, plan.topology, row_bytes(plan, pp_rank, row)
    element = BF16_BYTES if parallel.grad_reduce_in_bf16 else plan.shape.gradient
    held = plan.elements_by_kind(plan.placement.stages_of(pp_rank))
    gathers = plan.sharding is not None and plan.sharding.gathers
    gathered = row_moves.gathered_by_kind if gathers else held  # gradients alone: once, after the update
    found: dict[str, float] = {}
    for is_expert in (False, True) if plan.model.has_experts else (False,):
        num_shards, num_instances = topology.sharing(is_expert)
        reduced = row_moves.reduced_by_kind[is_expert] * element
        moved = gathered[is_expert] * plan.shape.element + reduced
        found[topology.shard_group(is_expert)] = ring_bytes(moved, num_shards)
        # what has one shard is reduced over the instances
        summed = held[is_expert] // num_shards * (element if num_shards == 1 else plan.shape.gradient)
        if num_instances > 1:
            found["expert_instances" if is_expert else "instances"] = ALL_REDUCE * ring_bytes(summed, num_instances)
    return found
