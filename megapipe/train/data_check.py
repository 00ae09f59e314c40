"""`DataCheck`: the token files are looked at during a run, on one rank of each host, and all ranks end together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce, gather_objects
from megapipe.data.source_files import SourceFiles
from megapipe.errors import DataError
from megapipe.monitor.heartbeat import READING
from megapipe.monitor.process import host


class DataCheck:
    """Comparisons of the token files with their state at the start, called by all ranks.

    say: prints a line once for all ranks. Both methods raise DataError on all ranks if a file of any host has changed.
    """

    def __init__(self, runtime: TrainingRuntime, files: SourceFiles, say: Callable[[str], None]) -> None:
        self._runtime, self._files, self._say = runtime, files, say

    def look(self) -> None:
        """Compare sizes and times; for every logged step."""
        self._check(self._files.look)

    def compare(self) -> None:
        """Compare sampled blocks; before every save."""
        self._check(self._files.compare)

    def _check(self, check: Callable[[], tuple[str, ...]]) -> None:
        if not self._files.paths:  # the same on all ranks
            return
        world, topology, found = self._runtime.groups.world, self._runtime.plan.topology, None
        if world.global_rank % (topology.ranks_per_node or topology.world_size) == 0:  # hosts may have copies
            with self._runtime.heartbeat.phase(READING):
                try:
                    for remark in check():
                        self._say(remark)
                except DataError as error:
                    found = f"{error} (seen on {host()})"
        has_changed = torch.tensor(int(found is not None), device=self._runtime.device)
        all_reduce(has_changed, world, "max")
        if has_changed:
            raise DataError(next(filter(None, gather_objects(found, world))))
