"""Which samples a dp rank takes at which moment of the run: arithmetic on the number of consumed samples, and reading ahead.

A step that begins after `consumed` samples takes the samples consumed .. consumed + global batch of the data set. Microbatch k of dp
rank d holds consumed + (k dp + d) micro .. + micro of them. So a step's global batch does not depend on dp, and the loader keeps no
position of its own: resuming, or changing dp or the batch size, needs only the number. Where windows of the data set are skipped, these are
numbers among the samples that are left.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np

from megapipe.data.batch import Batch, DocumentRules
from megapipe.data.dataset import TokenDataset
from megapipe.data.skipped import SkippedSamples
from megapipe.errors import DataError

AHEAD_PER_WORKER = 2


def microbatch_start(consumed_samples: int, microbatch: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> int:
    """First sample of a microbatch of a dp rank."""
    return consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size


class Loader:
    """Batches of one data set. num_workers: threads that read ahead; 0 reads when asked.

    Reading ahead guesses that the rank goes on as it went: the same stride again, over the border of steps too. A wrong guess costs a
    read. What goes wrong in a thread is raised where its batch is asked for.
    """

    def __init__(
        self, dataset: TokenDataset, rules: DocumentRules | None = None, *, num_workers: int = 0, name: str = "train"
    ) -> None:
        self.dataset = dataset
        self.rules = rules if rules is not None else DocumentRules()
        self.name = name
        self._num_ahead = AHEAD_PER_WORKER * num_workers
        self._workers = _Readers(num_workers, f"{name}-loader") if num_workers else None
        self._ready: OrderedDict[tuple[int, int], Future[Batch]] = OrderedDict()
        self._lock = threading.Lock()
        self._skipped = SkippedSamples()

    def skip(self, skipped: SkippedSamples, num_samples: int) -> None:
        """From now on pass over these places of the data set. num_samples: that the run will take in all.

        Raises DataError if so many are not left.
        """
        needed = skipped.place(num_samples - 1) + 1
        if skipped.windows and needed > len(self.dataset):
            self.dataset.grow(needed)
        if skipped.windows and needed > len(self.dataset):
            raise DataError(
                f"the {self.name} data has {len(self.dataset)} samples; with {needed - num_samples} skipped, {num_samples} to train on "
                f"need {needed}: give more data, or train {needed - len(self.dataset)} samples less"
            )
        with self._lock:
            self._skipped = skipped
            for waiting in self._ready.values():
                waiting.cancel()
            self._ready.clear()

    def microbatch(self, consumed_samples: int, k: int, dp_rank: int, dp_size: int, micro_batch_size: int) -> Batch:
        """Microbatch k of dp rank `dp_rank` in the step that begins after `consumed_samples`.

        Raises DataError where samples cannot be read, and past the last one: data sets are built for the whole run, so that is a wrong
        count and never wraps around.
        """
        start = microbatch_start(consumed_samples, k, dp_rank, dp_size, micro_batch_size)
        if start < 0 or self._skipped.place(start + micro_batch_size - 1) >= len(self.dataset):
            raise DataError(
                f"the {self.name} data has {len(self.dataset)} samples, but microbatch {k} of dp rank {dp_rank} (of {dp_size}) after "
                f"{consumed_samples} consumed samples needs {start}..{start + micro_batch_size}: the data set was built for a shorter run, "
                f"or without weights holds one epoch only; ask for more samples, or give --data-path weights"
            )
        if self._workers is None:
            return self._read(start, micro_batch_size)
        return self._read_ahead(start, micro_batch_size, dp_size * micro_batch_size, self._workers)

    def _read_ahead(self, start: int, count: int, stride: int, workers: _Readers) -> Batch:
        """The batch asked for, with the next ones put to work first."""
        with self._lock:
            for step in range(self._num_ahead + 1):
                key = (start + step * stride, count)
                if key not in self._ready and self._skipped.place(key[0] + count - 1) < len(self.dataset):
                    self._ready[key] = workers.submit(self._read, *key)
            wanted = self._ready[start, count]
            self._ready.move_to_end((start, count))
            # several stages of a rank may ask for the same microbatch, so a batch given out stays a while
            while len(self._ready) > 3 * (self._num_ahead + 1):
                self._ready.popitem(last=False)[1].cancel()
        return wanted.result()

    def _read(self, start: int, count: int) -> Batch:
        sample_ids = tuple(map(self._skipped.place, range(start, start + count)))
        try:
            samples = np.stack([self.dataset[i] for i in sample_ids])
        except OSError as error:
            raise DataError(
                f"samples {start} to {start + count - 1} of the {self.name} data cannot be read: {error}"
            ) from error
        return Batch.of(samples, sample_ids, self.rules)

    def close(self) -> None:
        """End the threads without waiting for what they are reading."""
        for waiting in self._ready.values():
            waiting.cancel()
        if self._workers is not None:
            self._workers.close()


class _Readers:
    """Daemon threads, so that a read that hangs (a lost network disk) cannot keep the process: those of concurrent.futures are joined."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Batch], Callable[[], Batch]] | None] = SimpleQueue()
        self._count = count
        for index in range(count):
            threading.Thread(target=self._serve, name=f"{name}_{index}", daemon=True).start()

    def submit(self, read: Callable[[int, int], Batch], start: int, count: int) -> Future[Batch]:
        future: Future[Batch] = Future()
        self._tasks.put((future, lambda: read(start, count)))
        return future

    def close(self) -> None:
        for _ in range(self._count):
            self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, read = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(read())
                except BaseException as error:
                    future.set_exception(error)
