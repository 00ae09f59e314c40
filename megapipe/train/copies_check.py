"""--check-weight-hash-across-dp-replicas-interval: compare copies of parameters and stop the run if they differ; and
`DataCheck`: the token files are looked at during a run, on one rank of each host. All ranks end together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce, gather_objects
from megapipe.config.files import is_hugging_face
from megapipe.data.fingerprint import SourceFiles
from megapipe.data_parallel.copies import Copies, CopyDifference
from megapipe.errors import DataError, TrainingError
from megapipe.monitor.heartbeat import PATIENCE, READING
from megapipe.monitor.process import host
from megapipe.topology import Topology
from megapipe.train.watch import rank_text

FLAG = "--check-weight-hash-across-dp-replicas-interval"
MOST_NAMES, MOST_DIFFERENCES = 3, 4  # listed one by one
Findings = tuple[str, tuple[CopyDifference, ...], tuple[str, ...]]  # host, differences, names of stale parameters


class CopiesCheck:
    """A comparison before the first step, every `interval` steps and before every save; none without an interval.

    Compares copies on different ranks, and on each rank the parameters with the master weights whose rounded copies
    they are, which finds what has changed since the last update. Called by all ranks.
    """

    def __init__(self, runtime: TrainingRuntime) -> None:
        self.interval = runtime.plan.config.training.check_weight_hash_across_dp_replicas_interval
        self._runtime = runtime
        self._copies = Copies(runtime.stores, runtime.groups, lambda: expert_biases(runtime))
        self._compared_step: int | None = None

    def compare(self, step: int) -> None:
        """Compare after a settled step, or before the first one; once per step, however often it is called.

        Raises TrainingError on all ranks, naming ranks and parameters, if the bits of any copy differ.
        """
        if self.interval is None or self._compared_step == step:
            return
        runtime, world = self._runtime, self._runtime.groups.world
        with runtime.heartbeat.phase("comparing copies", PATIENCE):
            runtime.stores.finish_weights()
            stale = tuple(runtime.optimizer.stale_parameters())  # not what their master weights round to
            differs = torch.tensor(int(self._copies.differ() or bool(stale)), device=runtime.device)
            all_reduce(differs, world, "max")
            if differs:
                of_ranks = gather_objects((host(), tuple(self._copies.differences()), stale), world)
                load = runtime.plan.config.checkpoint.load
                converted = load if step == 0 and is_hugging_face(load) else None
                raise TrainingError(_message(step, of_ranks, runtime.plan.topology, converted))
        self._compared_step = step


def expert_biases(runtime: TrainingRuntime) -> dict[str, Tensor]:
    """Return the biases of experts of this rank's stages, by name and stage."""
    return {
        f"decoder.layers.{layer}.mlp.router.expert_bias of stage {stage}": router.expert_bias
        for stage, module in sorted(runtime.stages.items())
        for layer, router in module.routers().items()
        if router.expert_bias is not None
    }


def _message(step: int, of_ranks: Sequence[Findings], topology: Topology, converted: str | None) -> str:
    """Return the error message. of_ranks: by global rank. converted: the folder that the weights were just read from,
    without checksums.
    """
    hosts, found, all_stale = zip(*of_ranks, strict=True)

    def named(ranks: Sequence[int]) -> str:
        return ", ".join(f"{rank_text(topology, rank)} on {hosts[rank]}" for rank in ranks)

    # differences that a majority decides come first
    differences = sorted(set(chain(*found)), key=lambda d: (len(d.suspects) == len(d.ranks), d.ranks, d.group))
    parts = [_difference_text(difference) for difference in differences[:MOST_DIFFERENCES]]
    if len(differences) > MOST_DIFFERENCES:
        parts.append(f"and {len(differences) - MOST_DIFFERENCES} more groups of ranks differ")
    stale = [rank for rank, names in enumerate(all_stale) if names][:MOST_DIFFERENCES]
    for rank in stale:
        names = all_stale[rank]
        verb = "is" if len(names) == 1 else "are"
        parts.append(f"on rank {rank}, {_names(names)} {verb} not what the optimizer's master weights round to")
    # the minority of a group, else the one rank that is in every group that differs
    all_suspects = [set(difference.suspects) for difference in differences]
    culprits = set().union(*(d.suspects for d in differences if len(d.suspects) < len(d.ranks)))
    if not culprits and differences and len(everywhere := set.intersection(*all_suspects)) == 1:
        culprits = everywhere
    if culprits or stale:
        who = f"on {named(sorted(culprits) or stale)}"
    else:
        either = sorted(set().union(*all_suspects))
        who = f"on one of {named(either[:MOST_DIFFERENCES])} (with two copies it is unknown which)"
    if converted is not None and not stale:
        return (
            f"the weights loaded from --load {converted} are not those of the other ranks {who}, found before the "
            f"first step: {'; '.join(parts)}. The start compares blocks of each tensor of the folder; its files differ "
            "elsewhere, or were read wrongly. Copy the folder again to that host and compare checksums of its files; "
            f"if they are the same on all hosts, test the memory and devices of that host ({FLAG})"
        )
    return (
        f"bits of the parameters have changed {who}, found after step {step}: {'; '.join(parts)}. Nothing was saved "
        "since; restart from the newest checkpoint, when all copies still agreed. Configuration, data and versions of "
        "all ranks were compared at the start and are equal. If it happens again on the same host, exclude that host "
        f"and test its memory and devices; if hosts change, it is a bug in what updates the parameters ({FLAG})"
    )


def _difference_text(difference: CopyDifference) -> str:
    place, ranks = difference.place, difference.ranks
    shown = list(zip(ranks, place.bits, strict=True))[:MOST_DIFFERENCES]
    values = ", ".join(f"{bits} on rank {rank}" for rank, bits in shown)
    count = f"{place.num_elements} of {place.of:,} elements {'differs' if place.num_elements == 1 else 'differ'}"
    listed = " ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return (
        f"{_names(difference.names)} over {difference.group} (ranks {listed}): {count} in the first, "
        f"element {place.index} is {values}"
    )


def _names(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


class DataCheck:
    """Comparisons of the token files with their state at the start, called by all ranks.

    say: prints a line once for all ranks. Both methods raise DataError on all ranks if a file of any host has changed.
    """

    def __init__(self, runtime: TrainingRuntime, paths: Collection[Path], say: Callable[[str], None]) -> None:
        self._runtime, self._say = runtime, say
        # on all ranks alike: a host that cannot write an index cache has no file of conversations in use
        self._is_used = bool(paths) or runtime.plan.config.data.sft
        self._files: SourceFiles | None = None  # of the first rank of a host: hosts may have copies
        self._failure: str | None = None
        topology = runtime.plan.topology
        if self._is_used and runtime.groups.world.global_rank % (topology.ranks_per_node or topology.world_size) == 0:
            try:
                self._files = SourceFiles(paths)
            except DataError as error:
                self._failure = str(error)

    def look(self) -> None:
        """Compare sizes and times; for every logged step."""
        self._check(SourceFiles.look)

    def compare(self) -> None:
        """Compare sampled blocks; before every save."""
        self._check(SourceFiles.compare)

    def _check(self, check: Callable[[SourceFiles], tuple[str, ...]]) -> None:
        if not self._is_used:  # the same on all ranks
            return
        world, found = self._runtime.groups.world, self._failure
        if self._files is not None:
            with self._runtime.heartbeat.phase(READING):
                try:
                    for remark in check(self._files):
                        self._say(remark)
                except DataError as error:
                    found = f"{error} (seen on {host()})"
        has_changed = torch.tensor(int(found is not None), device=self._runtime.device)
        all_reduce(has_changed, world, "max")
        if has_changed:
            raise DataError(next(filter(None, gather_objects(found, world))))
