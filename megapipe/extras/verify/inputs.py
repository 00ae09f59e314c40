"""Initial weights and global batches of a verification: random, reproducible, and the same for the grid and the
oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import DrawSlice, TrainingRuntime
from megapipe.config.config import ResolvedConfig
from megapipe.data.batch import Batch, DocumentRules
from megapipe.model.init import draw
from megapipe.sharding.spec import Init, ParamSpec

GlobalBatch = Sequence[Batch]  # microbatch k * dp + d of a global batch is microbatch k of dp_rank d

STANDARD_DEVIATION = 0.2  # of the initial weights
EOD_SHARE = 0.15  # share of end-of-document tokens where the configuration uses documents


def drawn_slices(seed: int, dtype: torch.dtype, std: float = STANDARD_DEVIATION) -> DrawSlice:
    """Return a function that draws one rank's slice of a parameter through the random streams of training.

    Every parameter is random, norms and biases too: at their usual 1 and 0 a missing norm or bias would go unnoticed.
    """

    def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        noise = draw(dataclasses.replace(spec, init=Init("normal", std)), tp_rank, tp, seed, torch.float64)
        return (noise + 1.0 if spec.init.kind == "ones" else noise).to(dtype)

    return slice_of


def whole_weights(specs: Iterable[ParamSpec], slices: DrawSlice) -> dict[str, Tensor]:
    """Return the whole tensors by name, as a world of one rank draws them."""
    return {spec.name: slices(spec, 0, 1) for spec in specs}


def random_batches(config: ResolvedConfig, dp: int, num_microbatches: Sequence[int], seed: int) -> list[GlobalBatch]:
    """Return one global batch of random tokens for each entry of `num_microbatches` (microbatches a dp rank).

    With --reset-position-ids, --reset-attention-mask or --eod-mask-loss the vocabulary's last token ends documents, a
    few in every sample.
    """
    random = np.random.default_rng([seed, 20])
    data, vocab = config.data, config.model.vocab_size
    has_documents = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    eod = vocab - 1 if has_documents else None
    rules = DocumentRules(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    micro, seq = config.training.micro_batch_size, config.model.seq_length
    batches: list[GlobalBatch] = []
    sample = 0
    for count in num_microbatches:
        batch = []
        for _ in range(count * dp):
            tokens = random.integers(0, vocab if eod is None else max(vocab - 1, 1), (micro, seq + 1))
            if eod is not None:
                tokens[random.random(tokens.shape) < EOD_SHARE] = eod
            batch.append(Batch.of(tokens, tuple(range(sample, sample + micro)), rules))
            sample += micro
        batches.append(batch)
    return batches


def share_of(runtime: TrainingRuntime, batch: GlobalBatch, step: int) -> Microbatches:
    """Return this rank's microbatches of a global batch, with the dropout keys of training."""
    seed, dp, dp_rank = runtime.plan.config.training.seed, runtime.plan.topology.dp, runtime.coordinates.dp_rank
    keys = Keys(seed, step, dp_rank, dp)
    return Microbatches(len(batch) // dp, lambda k: batch[k * dp + dp_rank], keys, runtime.device)
