"""`Course`: which samples the steps of a run take, and which step takes a sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from megapipe.data.skipped import SkippedSamples
from megapipe.plan.batch import BatchSchedule


@dataclass(frozen=True)
class Turn:
    """Where a sample is taken: the step, counted from 1, and there the microbatch of a data-parallel rank."""

    step: int
    microbatch: int
    dp_rank: int


@dataclass(frozen=True)
class Course:
    """anchors: samples consumed after some steps, of the run's checkpoints; between them the batch schedule says how it went on. A run that
    has changed its batch size on the way is thus told rightly wherever it has saved."""

    batch: BatchSchedule
    micro_batch_size: int
    skipped: SkippedSamples = field(default_factory=SkippedSamples)
    anchors: tuple[tuple[int, int], ...] = ()

    def consumed_before(self, step: int) -> int:
        """Samples trained on before a step."""
        at, consumed = max((anchor for anchor in ((0, 0), *self.anchors) if anchor[0] < step), default=(0, 0))
        if consumed == self.batch.samples_after(at):
            return self.batch.samples_after(step - 1)
        for _ in range(at, step - 1):
            consumed += self.batch.size_at(consumed)
        return consumed

    def samples(self, step: int) -> dict[Turn, range]:
        """Numbers of the samples of a step, by microbatch; `place` says where they lie in the data set."""
        first, micro = self.consumed_before(step), self.micro_batch_size
        dp = self.batch.samples_per_microbatch // micro
        starts = range(first, first + self.batch.size_at(first), micro)
        return {Turn(step, part // dp, part % dp): range(start, start + micro) for part, start in enumerate(starts)}

    def place(self, number: int) -> int:
        return self.skipped.index(number)

    def turn(self, place: int) -> Turn | None:
        """Who takes the sample at a place of the data set; None if it is skipped."""
        number = self.skipped.number(place)
        if number is None:
            return None
        low, high = 1, 2
        while self.consumed_before(high + 1) <= number:
            low, high = high, 2 * high
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.consumed_before(middle + 1) > number else (middle + 1, high)
        part = (number - self.consumed_before(low)) // self.micro_batch_size
        dp = self.batch.samples_per_microbatch // self.micro_batch_size
        return Turn(low, part // dp, part % dp)
