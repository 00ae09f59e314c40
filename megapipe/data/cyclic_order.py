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
        samples_at_once = dp_size * micro_batch_size
        epoch, inside = divmod(position, num_samples // samples_at_once * samples_at_once)
        microbatch, row = divmod(inside, samples_at_once)
        dp_rank, number = divmod(row, micro_batch_size)
        number += microbatch * micro_batch_size  # among the samples of this dp rank in this epoch
        if self.data_sharding:
            size = num_samples // samples_at_once * micro_batch_size
            return dp_rank * size + int(self.permutation(size, epoch)[number])
        size = num_samples // micro_batch_size * micro_batch_size
        return int(self.permutation(size, epoch)[number * dp_size + dp_rank])

    def check(self, position: int, num_samples: int, dp_size: int, micro_batch_size: int, name: str) -> None:
        """Raise DataError if an epoch is empty, or a step does not begin where a microbatch of all dp ranks ends."""
        samples_at_once = dp_size * micro_batch_size
        sizes = f"{dp_size} dp ranks x --micro-batch-size {micro_batch_size}"
        epoch_size = num_samples // samples_at_once * samples_at_once
        if not epoch_size:
            raise DataError(
                f"the {name} data has {num_samples} samples, fewer than the {samples_at_once} of {sizes}, and "
                "--dataloader-type cyclic leaves incomplete microbatches out: give more data or fewer dp ranks"
            )
        if position % epoch_size % samples_at_once:
            raise DataError(
                f"--dataloader-type cyclic cannot go on after {position} samples: {position % epoch_size} of an epoch "
                f"of {epoch_size} {name} samples are no multiple of {sizes}; use the dp size and microbatch size of "
                "the run before"
            )
