"""`Loader`: the microbatches of a dp rank, computed from the number of consumed samples, and read ahead by threads.

Microbatch k of dp rank d, in a step that begins after `consumed` samples (without skipped ones), holds `micro` samples
from consumed + (k dp + d) micro on. So a step's global batch does not depend on dp, and resuming, or changing dp or the
batch size, needs only `consumed`. A `CyclicOrder` maps these positions to other samples.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np

from megapipe.data.batch import Batch, DocumentRules
from megapipe.data.cyclic_order import CyclicOrder
from megapipe.data.dataset import SkippedSamples, TokenDataset
from megapipe.errors import DataError

AHEAD_PER_WORKER = 2


class Loader:
    """Microbatches of one dataset. num_workers: threads that read ahead; 0 reads on request. order: None is that of the
    dataset, which then holds the samples of the whole run.

    Reading ahead assumes that the rank continues with the same stride, across steps too; a wrong guess costs a read. An
    error in a thread is raised when its batch is requested. The threads are daemons, unlike those of an executor, so
    that a read that hangs (a lost network disk) cannot keep the process alive.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        rules: DocumentRules | None = None,
        *,
        num_workers: int = 0,
        name: str = "train",
        order: CyclicOrder | None = None,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.rules = rules if rules is not None else DocumentRules()
        self.name = name
        self._num_workers = num_workers
        self._num_ahead = AHEAD_PER_WORKER * num_workers
        self._tasks: SimpleQueue[tuple[Future[Batch], tuple[int, int, int]] | None] = SimpleQueue()
        self._ready: OrderedDict[tuple[int, int, int], Future[Batch]] = OrderedDict()  # by (start, count, dp_size)
        self._lock = threading.Lock()
        self._skipped = SkippedSamples()
        for index in range(num_workers):
            threading.Thread(target=self._serve, name=f"{name}-loader_{index}", daemon=True).start()

    def skip(self, skipped: SkippedSamples, num_samples: int) -> None:
        """Pass over these samples from now on. num_samples: those that the whole run takes, from the first one on.

        Raises DataError if the data set has fewer.
        """
        needed = 0 if self.order is not None else skipped.index(num_samples - 1) + 1  # a cyclic order has no end
        self.dataset.grow(needed)
        held = len(self.dataset)
        if needed > held:
            rule = f"with {needed - num_samples} skipped, training on {num_samples} needs {needed}"
            if not skipped.windows:
                rule = f"with its --global-batch-size the run takes {needed} to its last step"
            way = (
                f"give more data (files with weights are read several times), or train on {needed - held} samples less"
            )
            raise DataError(f"the {self.name} data has {held} samples; {rule}: {way}")
        with self._lock:
            self._skipped = skipped
            for waiting in self._ready.values():
                waiting.cancel()
            self._ready.clear()

    def microbatch(self, consumed_samples: int, k: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> Batch:
        """Return microbatch k of dp rank `dp_rank` in the step that begins after `consumed_samples`.

        Raises DataError if samples cannot be read or are past the last one: datasets are built for the whole run.
        """
        start = consumed_samples + (k * dp_size + dp_rank) * micro_batch_size
        if self.order is not None:
            position = self._skipped.index(consumed_samples)
            self.order.check(position, len(self.dataset), dp_size, micro_batch_size, self.name)
        if start < 0 or not self._has(start + micro_batch_size - 1):
            batch = f"microbatch {k} of dp rank {dp_rank} (of {dp_size}) after {consumed_samples} consumed samples"
            rule = f"the {self.name} data has {len(self.dataset)} samples, but {batch} needs"
            reason = "the dataset was built for a shorter run, or has no weights and so holds one epoch"
            way = "request more samples, or give --data-path weights"
            raise DataError(f"{rule} {start}..{start + micro_batch_size}: {reason}; {way}")
        read = self._read_ahead if self._num_workers else self._read
        return read(start, micro_batch_size, dp_size)

    def _has(self, number: int) -> bool:
        """Return True if there is a sample with this number."""
        return self.order is not None or self._skipped.index(number) < len(self.dataset)

    def _read_ahead(self, start: int, count: int, dp_size: int) -> Batch:
        """Queue the requested batch and the next ones, then wait for the requested one."""
        with self._lock:
            for step in range(self._num_ahead + 1):
                key = (start + step * dp_size * count, count, dp_size)
                if key not in self._ready and self._has(key[0] + count - 1):
                    self._ready[key] = Future()
                    self._tasks.put((self._ready[key], key))
            wanted = self._ready[start, count, dp_size]
            self._ready.move_to_end((start, count, dp_size))
            # several stages of a rank may request the same microbatch, so batches are kept for a while
            while len(self._ready) > 3 * (self._num_ahead + 1):
                self._ready.popitem(last=False)[1].cancel()
        return wanted.result()

    def _read(self, start: int, count: int, dp_size: int) -> Batch:
        sample_ids = tuple(map(self._skipped.index, range(start, start + count)))
        if self.order is not None:
            sizes = len(self.dataset), dp_size, count
            sample_ids = tuple(self.order.index(position, *sizes) for position in sample_ids)
        try:
            samples = np.stack([self.dataset[i] for i in sample_ids])
        except OSError as error:
            samples_text = f"samples {start} to {start + count - 1} of the {self.name} data"
            raise DataError(f"{samples_text} cannot be read: {error}") from error
        return Batch.of(samples, sample_ids, self.rules)

    def _serve(self) -> None:
        """Read queued batches in a thread until the loader is closed."""
        while (task := self._tasks.get()) is not None:
            future, key = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._read(*key))
                except BaseException as error:
                    future.set_exception(error)

    def close(self) -> None:
        """Stop the threads without waiting for reads in progress."""
        for waiting in self._ready.values():
            waiting.cancel()
        for _ in range(self._num_workers):
            self._tasks.put(None)
