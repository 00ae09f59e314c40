"""--check-weight-hash-across-dp-replicas-interval: copies of the parameters are compared, and a run in which they part is ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce, gather_objects
from megapipe.data_parallel.copies import Copies, Difference
from megapipe.errors import TrainingError
from megapipe.monitor.heartbeat import PATIENCE, Heartbeat
from megapipe.monitor.process import host
from megapipe.topology import Topology

FLAG = "--check-weight-hash-across-dp-replicas-interval"
MOST_NAMES, MOST_DIFFERENCES = 3, 4  # told one by one


@dataclass(frozen=True)
class _Seen:
    """What one rank has found out. stale: parameters that are not their master weights in the parameters' dtype."""

    host: str
    differences: tuple[Difference, ...]
    stale: tuple[str, ...]


class CopiesCheck:
    """Compares before the first step, every `interval` steps and before every save; never without an interval. Called by all ranks.

    Also compared, on each rank by itself: the parameters with the master weights of which they are rounded copies, which finds what has
    changed since the last update.
    """

    def __init__(self, runtime: TrainingRuntime, heartbeat: Heartbeat) -> None:
        self.interval = runtime.plan.config.training.check_weight_hash_across_dp_replicas_interval
        self._runtime, self._heartbeat = runtime, heartbeat
        self._copies = Copies(runtime.buffers, runtime.groups)
        self._compared_step: int | None = None

    def compare(self, step: int) -> None:
        """After a settled step, or before the first one; once a step, however often it is called.

        Raises TrainingError on all ranks, naming ranks and parameters, if any rank holds other bits than it should.
        """
        if self.interval is None or self._compared_step == step:
            return
        with self._heartbeat.phase("comparing copies", PATIENCE):
            self._runtime.gather.finish()
            self._compare(step)
        self._compared_step = step

    def _compare(self, step: int) -> None:
        runtime, world = self._runtime, self._runtime.groups.world
        stale = tuple(runtime.optimizer.stale_parameters())
        found = torch.tensor(int(self._copies.differ() or bool(stale)), device=runtime.device)
        all_reduce(found, world, "max")
        if found:
            seen = gather_objects(_Seen(host(), tuple(self._copies.differences()), stale), world)
            raise TrainingError(text(step, seen, runtime.plan.topology))


def text(step: int, seen: Sequence[_Seen], topology: Topology) -> str:
    """The message. seen: by global rank."""

    def named(ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank}{_place(topology, rank)} on {seen[rank].host}" for rank in ranks)

    differences = sorted(
        {d for one in seen for d in one.differences}, key=lambda d: (len(d.suspects) == len(d.ranks), d.ranks, d.group)
    )
    stale = [rank for rank, one in enumerate(seen) if one.stale]
    suspects = _common(differences)
    parts = [_told(difference, seen) for difference in differences[:MOST_DIFFERENCES]]
    if len(differences) > MOST_DIFFERENCES:
        parts.append(f"and {len(differences) - MOST_DIFFERENCES} more groups of ranks differ")
    parts += [
        f"on rank {rank}, {_names(seen[rank].stale)} {'is' if len(seen[rank].stale) == 1 else 'are'} not what the optimizer's master "
        "weights round to"
        for rank in stale[:MOST_DIFFERENCES]
    ]
    if suspects:
        who = f"changed on {named(suspects)}"
    elif stale:
        who = f"changed on {named(stale[:MOST_DIFFERENCES])}"
    else:
        either = sorted({rank for difference in differences for rank in difference.suspects})
        who = f"changed on one of {named(either[:MOST_DIFFERENCES])} (two copies cannot tell which)"
    return (
        f"bits of the parameters have {who}, found after step {step}: {'; '.join(parts)}. Nothing was saved since; start again to go on "
        "from the newest checkpoint, before which all copies agreed. If it comes again on the same host, leave that host out and test its "
        f"memory and devices; if hosts change, it is a bug in what updates the parameters ({FLAG})"
    )


def _common(differences: Sequence[Difference]) -> tuple[int, ...]:
    """Who is to blame: the minority of a group, or who alone is in every group that differs."""
    sure = {
        rank
        for difference in differences
        if len(difference.suspects) < len(difference.ranks)
        for rank in difference.suspects
    }
    if sure:
        return tuple(sorted(sure))
    everywhere = set.intersection(*(set(difference.suspects) for difference in differences)) if differences else set()
    return tuple(everywhere) if len(everywhere) == 1 else ()


def _told(difference: Difference, seen: Sequence[_Seen]) -> str:
    place = difference.place
    values = ", ".join(
        f"{bits} on rank {rank}"
        for rank, bits in list(zip(difference.ranks, place.bits, strict=True))[:MOST_DIFFERENCES]
    )
    count = f"{place.num_elements} of {place.of:,} elements {'differs' if place.num_elements == 1 else 'differ'}"
    ranks = " ".join(map(str, difference.ranks[:8])) + (" ..." if len(difference.ranks) > 8 else "")
    return f"{_names(difference.names)} over {difference.group} (ranks {ranks}): {count} in the first, element {place.index} is {values}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _place(topology: Topology, rank: int) -> str:
    coordinates = topology.coordinates(rank)
    sizes = {"pp": topology.pp, "dp": topology.dp, "cp": topology.cp, "tp": topology.tp}
    words = ", ".join(f"{axis} {getattr(coordinates, axis + '_rank')}" for axis, size in sizes.items() if size > 1)
    return f" ({words})" if words else ""
