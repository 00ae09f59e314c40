"""The random order of samples of `--dataloader-type cyclic`, that of Megatron-LM's MegatronPretrainingRandomSampler.

An epoch holds the samples of whole global microbatches (dp x micro samples); the rest of the data set is left out. Its
order is a permutation drawn with the number of the epoch as seed: of the samples of each dp rank's own part of the
data set (data sharding, the default), or of all samples, dealt out in turn. Epochs repeat without end. The order
depends on dp and on the microbatch size, but not on --seed.

It is a map from consumed samples, so all ranks begin an epoch together. In Megatron without data sharding, the first
ranks can read a microbatch more than the others at the end of an epoch, unless the run resumes there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megapipe.data.dataset import Array
from megapipe.errors import DataError


@dataclass(frozen=True)
class CyclicOrder:
    """Map from consumed samples to indices in the data set. permutation: (size, seed) -> that of 0 .. size - 1."""

    data_sharding: bool
    permutation: Callable[[int, int], Array]

    def index(self, position: int, num_samples: int, dp_size: int, micro_batch_size: int) -> int:
        """Return the index of the sample that is consumed after `position` others, of a data set of num_samples."""
        num_microbatches = num_samples // (dp_size * micro_batch_size)
        microbatch, row = divmod(position, dp_size * micro_batch_size)
        epoch, microbatch = divmod(microbatch, num_microbatches)
        dp_rank, number = divmod(row, micro_batch_size)
        number += microbatch * micro_batch_size  # among the samples of this dp rank in this epoch
        if self.data_sharding:
            size = num_microbatches * micro_batch_size
            return dp_rank * size + int(self.permutation(size, epoch)[number])
        size = num_samples // micro_batch_size * micro_batch_size
        return int(self.permutation(size, epoch)[number * dp_size + dp_rank])

    def check(self, position: int, num_samples: int, dp_size: int, micro_batch_size: int) -> None:
        """Raise DataError if an epoch is empty, or a step does not begin where a microbatch of all dp ranks ends."""
        at_once = dp_size * micro_batch_size
        rule = (
            f"--dataloader-type cyclic takes {dp_size} dp ranks x --micro-batch-size {micro_batch_size} samples at once"
        )
        if num_samples < at_once:
            raise DataError(f"{rule}, and the data has {num_samples}: give more data or fewer dp ranks")
        if position % (num_samples // at_once * at_once) % at_once:
            way = "continue with the dp size and microbatch size of the run before"
            raise DataError(
                f"{rule}, but {position} of {num_samples} samples are consumed, which is between two: {way}"
            )
