"""`DataCheck`: the token files are looked at during a run, on one rank of each host, and all ranks end together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import all_reduce, gather_objects
from megapipe.data.content import SourceFiles
from megapipe.errors import DataError
from megapipe.monitor.heartbeat import READING
from megapipe.monitor.process import host


class DataCheck:
    """Comparisons of the token files with their state at the start, called by all ranks.

    say: prints a line once for all ranks. Both methods raise DataError on all ranks if a file of any host has changed.
    """

    def __init__(self, runtime: TrainingRuntime, paths: Collection[Path], say: Callable[[str], None]) -> None:
        self._runtime, self._say, self._is_used = runtime, say, bool(paths)
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
