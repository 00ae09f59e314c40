"""`RowUpdates`: weight versions and optimizer steps within the row of an asynchronous schedule."""

from __future__ import annotations

from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.reducer import GradientReducer
from megapipe.optimizer.optimizer import Optimizer
from megapipe.schedule.weight_versions import WeightVersions


class RowUpdates:
    """The engine's `StageWeights` (PipeDream, arXiv:1806.03377; PipeDream-2BW, arXiv:2006.09503).

    An update sums the stage's gradients over its replicas, averages them over the microbatches of the update and
    applies them to the master weights of this rank's shards; the new weights become the newest version. Other stages
    update at their own times, so nothing here communicates with them. buffers: of the one stage on this rank.
    num_replicas: size of its replica group.
    """

    def __init__(
        self, buffers: StageBuffers, reducer: GradientReducer, optimizer: Optimizer, num_replicas: int
    ) -> None:
        self._buffers, self._reducer, self._optimizer, self._num_replicas = buffers, reducer, optimizer, num_replicas
        self._versions = WeightVersions((), (0,), ())
        self._rates: tuple[float, float, float | None] = (0.0, 0.0, None)
        self._first = self._num_done = 0

    def begin(
        self, versions: WeightVersions, lr: float, weight_decay: float, decoupled_lr: float | None = None
    ) -> None:
        """Prepare for a row, whose version 0 is the newest one now. The rates hold for all of its updates."""
        self._versions, self._rates = versions, (lr, weight_decay, decoupled_lr)
        self._first, self._num_done = self._buffers.newest, 0
        self._reducer.begin_step(versions.group_sizes[0])

    def use(self, stage: int, microbatch: int) -> None:
        """Install the version of this microbatch."""
        self._buffers.install(self._place_of(self._versions.version_of[microbatch]))

    def update(self, stage: int, microbatch: int) -> None:
        """Run one optimizer step of this rank. Afterwards the gradient buffers hold the average that it applied."""
        sizes = self._versions.group_sizes
        self._reducer.finish()
        denominator = sizes[self._num_done] * self._num_replicas
        self._num_done += 1
        self._buffers.newest = self._place_of(self._num_done)
        self._optimizer.update(1.0 / denominator, *self._rates)
        if self._num_done < len(sizes):
            self._reducer.begin_step(sizes[self._num_done])

    def finish(self) -> None:
        """Install the newest version after a row: evaluation, saving and the next row start from it."""
        self._buffers.install(self._buffers.newest)

    def _place_of(self, version: int) -> int:
        return (self._first + self._versions.buffer_of[version]) % self._buffers.num_versions
