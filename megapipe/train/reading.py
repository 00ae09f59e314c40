"""`Reader`: this rank's microbatches of a global batch, with their dropout keys; the heartbeat says when a rank waits for data."""

from __future__ import annotations

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.data.batch import Batch
from megapipe.data.loader import Loader
from megapipe.monitor.heartbeat import Heartbeat


class Reader:
    """Reads for one rank; microbatches are read when the engine first asks for them."""

    def __init__(self, runtime: TrainingRuntime, heartbeat: Heartbeat) -> None:
        self._dp, self._dp_rank = runtime.plan.topology.dp, runtime.coordinates.dp_rank
        self._training, self._device, self._heartbeat = runtime.plan.config.training, runtime.device, heartbeat

    def microbatches(self, loader: Loader, consumed: int, count: int, step: int | None) -> Microbatches:
        """The `count` microbatches of this rank after `consumed` samples of all ranks. step: None for evaluation, without dropout."""
        keys = None if step is None else Keys(self._training.seed, step, self._dp_rank, self._dp)

        def read(k: int) -> Batch:
            with self._heartbeat.phase("reading data"):
                return loader.microbatch(consumed, k, self._dp_rank, self._dp, self._training.micro_batch_size)

        return Microbatches(count, read, keys, self._device)
