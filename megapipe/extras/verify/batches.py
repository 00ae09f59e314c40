"""Global batches of random tokens, the same on every rank, and each rank's share of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.config.config import Config
from megapipe.data.batch import Batch, DocumentRules

GlobalBatch = Sequence[Batch]  # microbatch k x dp + d is microbatch k of dp rank d

EOD_SHARE = 0.15  # of the tokens, where documents mean something


def random_batches(config: Config, dp: int, num_microbatches: Sequence[int], seed: int) -> list[GlobalBatch]:
    """One global batch for each number of microbatches a dp rank. config: resolved.

    With --reset-position-ids, --reset-attention-mask or --eod-mask-loss the vocabulary's last token ends documents, a few in every sample.
    """
    random = np.random.default_rng([seed, 20])
    rules = document_rules(config)
    vocab, micro, seq = config.model.vocab_size, config.training.micro_batch_size, config.model.seq_length
    assert vocab is not None
    batches: list[GlobalBatch] = []
    sample = 0
    for count in num_microbatches:
        batch = []
        for _ in range(count * dp):
            tokens = random.integers(0, vocab if rules.eod is None else max(vocab - 1, 1), (micro, seq + 1))
            if rules.eod is not None:
                tokens[random.random(tokens.shape) < EOD_SHARE] = rules.eod
            batch.append(Batch.of(tokens, tuple(range(sample, sample + micro)), rules))
            sample += micro
        batches.append(batch)
    return batches


def document_rules(config: Config) -> DocumentRules:
    """The configuration's rules, with the vocabulary's last token as the end of a document."""
    data, vocab = config.data, config.model.vocab_size
    assert vocab is not None
    asked = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    return DocumentRules(
        vocab - 1 if asked else None, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
    )


def share_of(runtime: TrainingRuntime, batch: GlobalBatch, step: int) -> Microbatches:
    """This rank's microbatches of a global batch, with the dropout keys of training."""
    seed, dp, dp_rank = runtime.plan.config.training.seed, runtime.plan.topology.dp, runtime.coordinates.dp_rank
    return Microbatches(
        len(batch) // dp, lambda k: batch[k * dp + dp_rank], Keys(seed, step, dp_rank, dp), runtime.device
    )
