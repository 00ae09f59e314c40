"""Padding tokens in token files, which Megatron treats apart: their labels have no loss, and token 0 is the input.

It does so only if no other special token has the same id. Here a token counts like any other, so a run says it if its
data holds padding.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from megapipe.data.dataset import TokenDataset

NUM_SAMPLES = 16  # that are looked at


def padding_remarks(dataset: TokenDataset, pad: int | None, others: Collection[int | None]) -> tuple[str, ...]:
    """Return a line if the first samples hold the padding token. others: the ids of the tokenizer's special tokens."""
    if pad is None or pad in others:
        return ()
    samples = [dataset[index][1:] for index in range(min(NUM_SAMPLES, len(dataset)))]
    found = sum(int(np.count_nonzero(labels == pad)) for labels in samples)
    if not found:
        return ()
    total = sum(labels.size for labels in samples)
    return (
        f"{found} of the {total} labels in the first {len(samples)} training samples are the tokenizer's padding token "
        f"{pad}: here they count in the loss, while Megatron gives them none and feeds token 0 in their place",
    )
