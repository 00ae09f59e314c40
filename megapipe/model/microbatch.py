"""`Microbatch`: what every stage of a pipeline gets besides the hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapipe.model.kv_cache import KVCache
from megapipe.tensor_parallel.random import DropoutKey


@dataclass(frozen=True)
class Microbatch:
    """The tokens of one microbatch on one data-parallel rank, the same on all its tp and pp ranks. All tensors are [b, s]."""

    tokens: Tensor  # int64
    labels: Tensor | None = None  # int64, the token after each; None for inference
    loss_mask: Tensor | None = None  # weight of each token's loss, None: all 1
    position_ids: Tensor | None = None  # None: 0 .. s - 1
    document_ids: Tensor | None = None  # equal ids see each other; None: one document
    dropout_key: DropoutKey | None = None  # None: no dropout (evaluation, inference)
    cache: KVCache | None = None  # generation: tokens continue what is cached; position_ids are needed then


@dataclass(frozen=True)
class StageLoss:
    """What the last stage returns: sums over the microbatch, so that any average can be taken later. Scalars, at least fp32."""

    loss_sum: Tensor  # sum of loss * loss_mask over the tokens, the same on all tp ranks
    num_tokens: Tensor  # sum of loss_mask
