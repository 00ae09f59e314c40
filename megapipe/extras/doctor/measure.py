"""Carries rounds of trials out on all ranks and tells all of them what they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from megapipe.comm.collectives import barrier, gather_objects
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.comm.timing import Times, time_collective, time_messages
from megapipe.extras.doctor.trials import Round, Trial
from megapipe.extras.doctor.verdict import Sample

# bytes: one that takes no time by its size, then buffers; the largest is what rates are told of
SIZES: dict[str, tuple[int, ...]] = {"cpu": (8, 1 << 18, 1 << 22), "cuda": (8, 1 << 20, 1 << 26)}


@dataclass(frozen=True)
class Meter:
    """budget_seconds: for the repeats of one size of one trial."""

    groups: ProcessGroups
    device: torch.device
    budget_seconds: float

    def measure(self, rounds: Sequence[Round]) -> list[Sample]:
        """Of all trials, on every rank, in the order of the rounds. Called by all ranks. Raises CommunicationError."""
        world, mine = self.groups.world, []
        for trials in rounds:
            barrier(world)
            trial = next((trial for trial in trials if world.global_rank in trial.ranks), None)
            if trial is not None and (times := self._measure(trial)):
                mine.append(Sample(trial, times))
        by_trial = {sample.trial: sample for some in gather_objects(mine, world) for sample in some}
        return [by_trial[trial] for trials in rounds for trial in trials]

    def _measure(self, trial: Trial) -> Times:
        """{} on ranks that have nothing to tell."""
        group, sizes = self._group(trial.group), SIZES[self.device.type]
        if trial.is_message:
            source, target = (group.ranks.index(rank) for rank in trial.ranks)
            return time_messages(group, source, target, sizes, self.budget_seconds, self.device)
        times = time_collective(trial.operation, group, sizes, self.budget_seconds, self.device)
        return times if group.rank == 0 else {}

    def _group(self, name: str) -> Group:
        found: dict[str, Group | None] = {field.name: getattr(self.groups, field.name) for field in fields(self.groups)}
        group = found[name]
        assert group is not None
        return group
