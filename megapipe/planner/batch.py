"""The global batch size over a run: constant, or ramped up by samples consumed, as Megatron's --rampup-batch-size."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.errors import ConfigError


@dataclass(frozen=True)
class BatchSchedule:
    """Sequences in each step.

    The ramp goes from `start` to `full` in steps of `increment`, each lasting ramp_samples / ((full - start) / increment) sequences.
    samples_per_microbatch: micro batch x dp; every batch size is a multiple of it.
    """

    full: int
    samples_per_microbatch: int
    start: int = 0
    increment: int = 0
    ramp_samples: int = 0

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size % self.samples_per_microbatch:
                unit = self.samples_per_microbatch
                near = sorted({max(unit, size // unit * unit), (size // unit + 1) * unit})
                what = "--global-batch-size" if size == self.full else f"--rampup-batch-size {self.start} {self.increment} reaches"
                raise ConfigError(
                    f"{what} {size} is not a multiple of micro-batch-size x data-parallel size = {unit}; "
                    f"use {' or '.join(map(str, near))}, or another --micro-batch-size"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every batch size that will occur, smallest first."""
        return (*range(self.start, self.full, self.increment), self.full) if self.increment else (self.full,)

    def size_at(self, consumed_samples: int) -> int:
        """Sequences of the step that starts after `consumed_samples`."""
        if not self.increment or consumed_samples > self.ramp_samples:
            return self.full
        increments = (self.full - self.start) // self.increment
        reached = consumed_samples * increments // self.ramp_samples if self.ramp_samples else increments
        return min(self.full, self.start + reached * self.increment)

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Microbatches each data-parallel rank runs in the step that starts after `consumed_samples`."""
        return self.size_at(consumed_samples) // self.samples_per_microbatch

    def samples_after(self, num_steps: int) -> int:
        """Sequences consumed after `num_steps` steps from the beginning."""
        consumed = steps = 0
        while steps < num_steps and self.size_at(consumed) != self.full:
            consumed += self.size_at(consumed)
            steps += 1
        return consumed + (num_steps - steps) * self.full

    def steps_for(self, samples: int) -> int:
        """Whole steps that `samples` sequences are enough for."""
        consumed = steps = 0
        while self.size_at(consumed) != self.full:
            if consumed + self.size_at(consumed) > samples:
                return steps
            consumed += self.size_at(consumed)
            steps += 1
        return steps + (samples - consumed) // self.full


def batch_schedule(full: int, micro_batch_size: int, dp: int, rampup: tuple[int, int, int] | None) -> BatchSchedule:
    """The checked schedule. rampup: (start, increment, samples). Raises ConfigError naming the size that does not divide."""
    if rampup is None:
        return BatchSchedule(full, micro_batch_size * dp)
    start, increment, samples = rampup
    if start > full:
        raise ConfigError(f"--rampup-batch-size starts at {start}, above --global-batch-size {full}; start at or below it")
    if start == full:
        return BatchSchedule(full, micro_batch_size * dp)
    if increment < 1 or (full - start) % increment:
        raise ConfigError(
            f"--rampup-batch-size {start} {increment} {samples} never reaches --global-batch-size {full}: "
            f"the increment must divide {full - start}"
        )
    return BatchSchedule(full, micro_batch_size * dp, start, increment, samples)
