"""One microbatch of one dp rank: samples cut into inputs and labels, and what documents inside a sample mean for positions, attention
and loss.

The end-of-document token belongs to the document that it ends. Behind it positions start again (--reset-position-ids), attention does
not look back across it (--reset-attention-mask), and the position at which it is the input carries no loss (--eod-mask-loss): what
follows it is the first token of an unrelated document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megapipe.data.dataset import TokenArray
from megapipe.errors import ConfigError


@dataclass(frozen=True)
class DocumentRules:
    """What the end-of-document token `eod` does; all off by default. Raises ConfigError if something is asked and there is no such
    token."""

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        asked = {
            "--reset-position-ids": self.reset_position_ids,
            "--reset-attention-mask": self.reset_attention_mask,
            "--eod-mask-loss": self.eod_mask_loss,
        }
        if self.eod is None and any(asked.values()):
            names = ", ".join(name for name, is_asked in asked.items() if is_asked)
            raise ConfigError(
                f"{names} need an end-of-document token, and no tokenizer with one is given: set --tokenizer-type and its model"
            )


@dataclass(frozen=True)
class Batch:
    """Arrays of one microbatch. What no rule asks for is None, so that a model can take its faster road without it.

    loss_mask: 1 where the loss counts; None: everywhere. position_ids None: 0 .. seq - 1. document_ids: which document of its sample each
    token is in, counted from 0; None: attend to all before.
    """

    tokens: TokenArray  # [micro, seq]
    labels: TokenArray  # [micro, seq]: the token that follows each
    loss_mask: NDArray[np.float32] | None  # [micro, seq]
    position_ids: TokenArray | None  # [micro, seq]
    document_ids: NDArray[np.int64] | None  # [micro, seq]
    sample_ids: tuple[int, ...]  # [micro] places in the data set, for messages

    @classmethod
    def of(cls, samples: TokenArray, sample_ids: tuple[int, ...], rules: DocumentRules) -> Batch:
        """samples: [micro, seq + 1]."""
        tokens, labels = np.ascontiguousarray(samples[:, :-1]), np.ascontiguousarray(samples[:, 1:])
        is_eod: NDArray[np.bool_] = np.equal(tokens, -1 if rules.eod is None else rules.eod)
        loss_mask = np.where(is_eod, np.float32(0.0), np.float32(1.0)) if rules.eod_mask_loss else None
        position_ids = _positions(is_eod) if rules.reset_position_ids else None
        document_ids = _documents(is_eod) if rules.reset_attention_mask else None
        return cls(tokens, labels, loss_mask, position_ids, document_ids, sample_ids)


def _documents(is_eod: NDArray[np.bool_]) -> TokenArray:
    """[micro, seq]: ends of document before each token."""
    return np.cumsum(is_eod, axis=1, dtype=np.int64) - is_eod


def _positions(is_eod: NDArray[np.bool_]) -> TokenArray:
    """[micro, seq]: distance of each token from the start of its document (or of the sample, where it began before)."""
    places = np.arange(is_eod.shape[1], dtype=np.int64)
    starts = np.zeros(is_eod.shape, dtype=np.int64)
    starts[:, 1:] = np.where(is_eod[:, :-1], places[1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)
