"""Rules of --pipe-sp-splits: how many slices a sequence can have, and how long they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megapipe.config.config import Config

FLAG = "--pipe-sp-splits"
FP8_MULTIPLE = 16  # the matrix units of Hopper need every size of an fp8 GEMM to be a multiple of this


def slice_unit(config: Config) -> int:
    """Return the number of tokens of which the length of every slice is a multiple: with sequence parallelism of tp,
    with fp8 of what its GEMMs need, both on each cp rank, which has two chunks of it.
    """
    parallel, batch = config.parallel, config.training.micro_batch_size
    cp, unit = parallel.context_parallel_size, parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    if config.precision.fp8_format is not None:
        unit = math.lcm(unit, FP8_MULTIPLE // math.gcd(FP8_MULTIPLE, batch))
    return unit if cp == 1 else math.lcm(2 * cp, cp * unit)


def length(config: Config) -> Iterator[str]:
    """Check that every slice can have the least number of tokens."""
    seq, slices, unit = config.model.seq_length, config.parallel.pipe_sp_splits, slice_unit(config)
    most = seq // unit
    if slices > 1 and slices > most >= 1:
        rule = f" of a multiple of {unit} tokens" if unit > 1 else ""
        yield f"{FLAG} {slices}: --seq-length {seq} has at most {most} slices{rule}; use {most} or fewer"


def dropout(config: Config) -> Iterator[str]:
    """Refuse dropout, whose masks are drawn for whole sequences."""
    parallel, model = config.parallel, config.model
    if parallel.pipe_sp_splits > 1 and (model.hidden_dropout or model.attention_dropout):
        yield (
            f"{FLAG} {parallel.pipe_sp_splits} with --hidden-dropout {model.hidden_dropout:g} and --attention-dropout "
            f"{model.attention_dropout:g}: masks would depend on the number of slices; use 0 for both"
        )


RULES = (length, dropout)
