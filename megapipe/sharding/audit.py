"""A check before training that the ranks hold every element of every global tensor exactly as often as declared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megapipe.errors import ConfigError
from megapipe.sharding.boxes import pieces
from megapipe.sharding.buffers import BufferLayout
from megapipe.sharding.spec import ParamSpec


def audit_stages(specs: Sequence[ParamSpec], stages: Mapping[int, Sequence[ParamSpec]]) -> None:
    """Check that each parameter is in exactly one stage, and a tied embedding in that of the head, too.

    Raises ConfigError naming the parameter and the stages that hold it.
    """
    holders: dict[str, list[int]] = {spec.name: [] for spec in specs}
    for stage, held in stages.items():
        for spec in held:
            if spec.name not in holders:
                raise ConfigError(f"stage {stage} holds {spec.name}, which the model does not have")
            holders[spec.name].append(stage)
    for spec in specs:
        held_by = holders[spec.name]
        if not held_by:
            raise ConfigError(f"no stage holds {spec.name}: the cut of layers drops it")
        ends = [min(stages), max(stages)]
        if len(held_by) > 1 and not (spec.tied and sorted(held_by) == ends):
            raise ConfigError(
                f"{spec.name} is held by stages {held_by}; only a tied embedding may be in two, the first and the last"
            )


def audit_slices(specs: Iterable[ParamSpec], tp: int, num_expert_ranks: int = 1) -> None:
    """Check that each element of each global tensor is held by exactly its declared tp ranks, and owned by one.

    num_expert_ranks: ep x etp, over which experts are cut.

    Raises ConfigError naming parameter, rows and ranks.
    """
    alike = {(spec.shape, spec.slicing, spec.is_expert): spec for spec in reversed(list(specs))}  # layers repeat
    for spec in reversed(alike.values()):
        held: dict[tuple[int, int], list[int]] = {}
        declared: dict[tuple[int, int], tuple[int, ...]] = {}
        num_ranks = num_expert_ranks if spec.is_expert else tp
        for tp_rank in range(num_ranks):
            for interval in spec.intervals(tp_rank, num_ranks):
                held.setdefault((interval.start, interval.stop), []).append(tp_rank)
                declared[interval.start, interval.stop] = interval.replicas
        position = 0
        for (start, stop), ranks in sorted(held.items()):
            if start != position:
                rows = f"rows {min(start, position)} to {max(start, position)}"
                raise ConfigError(f"{spec.name}: {rows} are held by no tp_rank, or by two")
            if tuple(ranks) != declared[start, stop]:
                rows = f"rows {start} to {stop}"
                raise ConfigError(f"{spec.name}: {rows} are on tp_ranks {ranks}, declared {declared[start, stop]}")
            position = stop
        if position != spec.shape[spec.slicing.dim or 0]:
            raise ConfigError(f"{spec.name}: rows from {position} on are held by no tp_rank")


def audit_buffers(
    specs: Sequence[ParamSpec],
    layouts: Sequence[BufferLayout],
    tp_rank: int,
    tp: int,
    expert_cut: tuple[int, int] = (0, 1),
) -> None:
    """Check that each parameter of a stage has one slot, that slots do not overlap and that shards cover their bucket.

    expert_cut: the rank's place among the ep x etp ranks that cut experts, and their number.

    Raises ConfigError naming the parameter or the range.
    """
    placed = [slot.spec.name for layout in layouts for slot in layout.slots]
    if sorted(placed) != sorted(spec.name for spec in specs):
        raise ConfigError(f"buffers hold {sorted(placed)}, the stage holds {sorted(spec.name for spec in specs)}")
    for layout in layouts:
        position, cut = 0, expert_cut if layout.is_expert else (tp_rank, tp)
        for bucket in layout.buckets:
            if bucket.start != position or (bucket.stop - bucket.start) % layout.num_shards:
                found = f"{layout.kind} bucket [{bucket.start}, {bucket.stop})"
                raise ConfigError(f"{found} leaves a gap or does not divide into {layout.num_shards}")
            end = bucket.start
            for slot in bucket.slots:
                if slot.start < end or slot.stop > bucket.stop:
                    raise ConfigError(
                        f"{slot.spec.name} at [{slot.start}, {slot.stop}) overlaps its neighbour or exceeds its bucket"
                    )
                if sum(piece.box.num_elements for piece in pieces(slot.spec, *cut)) != slot.numel:
                    raise ConfigError(f"{slot.spec.name}: its boxes do not add up to its {slot.numel} local elements")
                end = slot.stop
            position = bucket.stop
