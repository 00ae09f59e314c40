"""The global batch size over a run: constant, ramped up by consumed samples (--rampup-batch-size), or changed at given
numbers of tokens (--step-batch-size-schedule).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter

from megapipe.config.problems import divisors, nearest_values
from megapipe.errors import ConfigError
from megapipe.formatting import one_of

MOST_MICROBATCHES = 100_000  # of a step on one rank
Steps = tuple[tuple[int, int], ...]  # (consumed sequences, sequences of a step from there on), ascending


@dataclass(frozen=True)
class BatchSchedule:
    """The number of sequences in each step."""

    full: int  # of the last steps
    samples_per_microbatch: int  # micro batch x dp; every batch size is a multiple of it
    steps: Steps = ()  # from 0 to `full`; empty: constant
    flag: str = ""  # the option that changes the size
    is_derived: bool = False  # `full` is not given: it is one microbatch of each data-parallel rank

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a data-parallel rank in a step of full size."""
        return self.full // self.samples_per_microbatch

    @property
    def sizes(self) -> tuple[int, ...]:
        """All batch sizes of the run, smallest first."""
        return tuple(sorted({size for _, size in self.steps})) or (self.full,)

    def flag_of(self, size: int) -> str:
        """Return the flag that asks for a batch of this size, for messages."""
        return "--global-batch-size" if size == self.full else f"{self.flag} reaches"

    def size_at(self, consumed_samples: int) -> int:
        """Return the sequences of the step that starts after `consumed_samples`."""
        return self.steps[self._next_step(consumed_samples) - 1][1] if self.steps else self.full

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Return the microbatches of a data-parallel rank in the step that starts after `consumed_samples`."""
        return self.size_at(consumed_samples) // self.samples_per_microbatch

    def samples_after(self, num_steps: int, consumed: int = 0) -> int:
        """Return the sequences consumed after `num_steps` steps from the place after `consumed` of them."""
        while num_steps and (at := self._next_step(consumed)) < len(self.steps):
            size = self.size_at(consumed)
            count = min(num_steps, -(-(self.steps[at][0] - consumed) // size))
            consumed, num_steps = consumed + count * size, num_steps - count
        return consumed + num_steps * self.full

    def steps_for(self, samples: int) -> int:
        """Return the number of whole steps in `samples` sequences."""
        return bisect_right(range(1, samples + 1), samples, key=self.samples_after)

    def _next_step(self, consumed_samples: int) -> int:
        """Return the index of the first change of size after `consumed_samples`."""
        return bisect_right(self.steps, consumed_samples, key=itemgetter(0))


def ramp(start: int, increment: int, full: int, samples: int) -> Steps:
    """Return the steps of a ramp: from `start` to `full` in equal shares of `samples` sequences."""
    count = max(1, (full - start) // increment)
    return tuple((-(-step * samples // count), start + step * increment) for step in range(count + 1))


def batch_schedule(
    full: int | None,
    micro_batch_size: int,
    dp: int,
    rampup: tuple[int, int, int] | None,
    ranks_per_replica: int = 1,
    steps: Steps = (),
) -> BatchSchedule:
    """Build the batch schedule. Raises ConfigError with the size that does not divide, and sizes that would.

    full: None for one microbatch of each data-parallel rank. rampup: (start, increment, samples), or in its place
    steps. ranks_per_replica: tp x cp x pp, for the message.
    """
    unit, flag = micro_batch_size * dp, "--step-batch-size-schedule"
    if full is None:
        return BatchSchedule(unit, unit, is_derived=True)
    num_sizes = len(steps)
    if rampup is not None:
        start, increment, samples = rampup
        flag = f"--rampup-batch-size {start} {increment}"
        if start > full:
            raise ConfigError(
                f"--rampup-batch-size starts at {start}, above --global-batch-size {full}; start at or below it"
            )
        if start < full and (increment < 1 or (full - start) % increment):
            raise ConfigError(
                f"--rampup-batch-size {start} {increment} {samples} never reaches --global-batch-size {full}: "
                f"the increment must divide {full - start}"
            )
        num_sizes = (full - start) // increment + 1 if start < full else 1
    largest = max([full, *(size for _, size in steps)])
    if largest // unit > MOST_MICROBATCHES or num_sizes > MOST_MICROBATCHES:
        raise ConfigError(
            f"--global-batch-size {largest} is {largest // unit} microbatches on each rank, in {num_sizes} sizes; "
            f"at most {MOST_MICROBATCHES} of each can be scheduled"
        )
    if rampup is not None and start < full:
        steps = ramp(start, increment, full, samples)
    schedule = BatchSchedule(full, unit, steps, flag)
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
