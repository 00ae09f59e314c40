"""The global batch size over a run: constant, or ramped up by consumed samples (Megatron's --rampup-batch-size)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from megapipe.config.problems import divisors, nearest_values
from megapipe.errors import ConfigError
from megapipe.formatting import one_of

MOST_MICROBATCHES = 100_000  # of a step on one rank


@dataclass(frozen=True)
class BatchSchedule:
    """The number of sequences in each step.

    The ramp goes from `start` to `full` in steps of `increment`, each lasting ramp_samples / ((full - start) /
    increment) sequences.
    """

    full: int
    samples_per_microbatch: int  # micro batch x dp; every batch size is a multiple of it
    start: int = 0
    increment: int = 0
    ramp_samples: int = 0
    is_derived: bool = False  # `full` is not given: it is one microbatch of each data-parallel rank

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a data-parallel rank in a step of full size."""
        return self.full // self.samples_per_microbatch

    @property
    def num_sizes(self) -> int:
        """The number of batch sizes of the run."""
        return (self.full - self.start) // self.increment + 1 if self.increment else 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """All batch sizes of the run, smallest first."""
        return (*range(self.start, self.full, self.increment), self.full) if self.increment else (self.full,)

    def flag_of(self, size: int) -> str:
        """Return the flag that asks for a batch of this size, for messages."""
        is_full = size == self.full
        return "--global-batch-size" if is_full else f"--rampup-batch-size {self.start} {self.increment} reaches"

    def size_at(self, consumed_samples: int) -> int:
        """Return the sequences of the step that starts after `consumed_samples`."""
        if not self.increment or consumed_samples > self.ramp_samples:
            return self.full
        increments = (self.full - self.start) // self.increment
        reached = consumed_samples * increments // self.ramp_samples if self.ramp_samples else increments
        return min(self.full, self.start + reached * self.increment)

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Return the microbatches of a data-parallel rank in the step that starts after `consumed_samples`."""
        return self.size_at(consumed_samples) // self.samples_per_microbatch

    def samples_after(self, num_steps: int, consumed: int = 0) -> int:
        """Return the sequences consumed after `num_steps` steps from the place after `consumed` of them."""
        steps = 0
        while (size := self.size_at(consumed)) != self.full:
            count = min(num_steps - steps, self._steps_of_size_at(consumed))
            consumed, steps = consumed + count * size, steps + count
            if steps == num_steps:
                return consumed
        return consumed + (num_steps - steps) * self.full

    def steps_for(self, samples: int) -> int:
        """Return the number of whole steps in `samples` sequences."""
        return bisect_right(range(1, samples + 1), samples, key=self.samples_after)

    def _steps_of_size_at(self, consumed: int) -> int:
        """Return how many steps from there on have the size of the step that starts after `consumed`."""
        size = self.size_at(consumed)
        increments = (self.full - self.start) // self.increment
        reached = (size - self.start) // self.increment + 1
        end = min(-(-reached * self.ramp_samples // increments), self.ramp_samples + 1)
        return max(1, -(-(end - consumed) // size))


def batch_schedule(
    full: int | None, micro_batch_size: int, dp: int, rampup: tuple[int, int, int] | None, ranks_per_replica: int = 1
) -> BatchSchedule:
    """Build the batch schedule. Raises ConfigError with the size that does not divide, and sizes that would.

    full: None for one microbatch of each data-parallel rank. rampup: (start, increment, samples).
    ranks_per_replica: tp x cp x pp, for the message.
    """
    unit = micro_batch_size * dp
    if full is None:
        return BatchSchedule(unit, unit, is_derived=True)
    start, increment, samples = rampup or (full, 0, 0)
    if start > full:
        raise ConfigError(
            f"--rampup-batch-size starts at {start}, above --global-batch-size {full}; start at or below it"
        )
    if start < full and (increment < 1 or (full - start) % increment):
        raise ConfigError(
            f"--rampup-batch-size {start} {increment} {samples} never reaches --global-batch-size {full}: "
            f"the increment must divide {full - start}"
        )
    schedule = BatchSchedule(full, unit, start, increment, samples) if start < full else BatchSchedule(full, unit)
    if full // unit > MOST_MICROBATCHES or schedule.num_sizes > MOST_MICROBATCHES:
        raise ConfigError(
            f"--global-batch-size {full} is {full // unit} microbatches on each rank, in {schedule.num_sizes} sizes; "
            f"at most {MOST_MICROBATCHES} of each can be scheduled"
        )
    size = next((size for size in schedule.sizes if size % unit), None)
    if size is None:
        return schedule
    ways = [f"use {one_of(sorted({max(unit, size // unit * unit), (size // unit + 1) * unit}))}"]
    ways.append("another --micro-batch-size")
    if all(other % micro_batch_size == 0 for other in schedule.sizes):
        fitting = nearest_values(divisors(*(other // micro_batch_size for other in schedule.sizes)), dp)
        ranks = f"= {one_of([number * ranks_per_replica for number in fitting])} " if ranks_per_replica > 1 else ""
        ways.append(f"dp {one_of(fitting)} {ranks}ranks")
    raise ConfigError(
        f"{schedule.flag_of(size)} {size} is not a multiple of micro-batch-size {micro_batch_size} x data-parallel "
        f"size {dp} = {unit}; {', or '.join(ways)}"
    )
