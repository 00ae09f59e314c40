"""One microbatch of one dp rank: samples split into inputs and labels, with the rules for documents inside a sample.

The end-of-document token belongs to the document that it ends. After it positions restart (--reset-position-ids),
attention does not look back across it (--reset-attention-mask), and the position where it is the input has no loss
(--eod-mask-loss), since the next token belongs to an unrelated document.

Samples of conversations (--sft) say themselves what is trained and where a conversation begins; the rules for documents
do not apply to them.

Megatron treats padding tokens in token files apart, if no other special token has the same id: their labels have no
loss, and token 0 is the input. Here a token counts like any other, so a run says it if its data holds padding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megapipe.data.dataset import TokenArray, TokenDataset
from megapipe.errors import ConfigError

MASKED_ROWS = 2  # of a sample with a loss mask: tokens, and 1 where the token is trained
# of a sample of conversations: tokens; 1 where the token is trained; number of the conversation, or PADDING
CHAT_ROWS = 3
PADDING = -1
NUM_SAMPLES = 16  # that are looked at


@dataclass(frozen=True)
class DocumentRules:
    """The effects of the end-of-document token `eod`, all off by default. Raises ConfigError for one without `eod`."""

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        flags = {
            "--reset-position-ids": self.reset_position_ids,
            "--reset-attention-mask": self.reset_attention_mask,
            "--eod-mask-loss": self.eod_mask_loss,
        }
        names = ", ".join(name for name, is_set in flags.items() if is_set)
        if self.eod is None and names:
            raise ConfigError(f"{names} need an end-of-document token; give --tokenizer-type and a model that has one")


@dataclass(frozen=True)
class Batch:
    """The arrays of one microbatch. Arrays that no rule needs are None, which allows faster kernels."""

    tokens: TokenArray  # [micro, seq]
    labels: TokenArray  # [micro, seq]: the next token of each
    loss_mask: NDArray[np.float32] | None  # [micro, seq]: 1 where the loss counts; None: everywhere
    position_ids: TokenArray | None  # [micro, seq]; None: 0 .. seq - 1
    document_ids: NDArray[np.int64] | None  # [micro, seq]: document within the sample, from 0; None: plain causal mask
    sample_ids: tuple[int, ...]  # [micro]: indices in the dataset, for messages
    loss_tokens: float | None = None  # sum of the loss mask of whole sequences, where the arrays are a part of them
    # [micro, seq]: True where there is no token, which experts do not see; None in batches that are never padded
    padding: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, samples: TokenArray, sample_ids: tuple[int, ...], rules: DocumentRules) -> Batch:
        """Build a microbatch. samples: [micro, seq + 1], or [micro, MASKED_ROWS or CHAT_ROWS, seq + 1]."""
        trained = None
        if samples.ndim == 3 and samples.shape[1] == CHAT_ROWS:
            chats, trained = samples[:, 2, :-1], samples[:, 1, 1:].astype(np.float32)
            tokens, labels = np.ascontiguousarray(samples[:, 0, :-1]), np.ascontiguousarray(samples[:, 0, 1:])
            positions, documents = _positions(chats[:, 1:] != chats[:, :-1]), np.ascontiguousarray(chats)
            return cls(tokens, labels, trained, positions, documents, sample_ids, padding=chats == PADDING)
        if samples.ndim == 3:
            samples, trained = samples[:, 0], samples[:, 1, 1:].astype(np.float32)
        tokens, labels = np.ascontiguousarray(samples[:, :-1]), np.ascontiguousarray(samples[:, 1:])
        is_eod: NDArray[np.bool_] = np.equal(tokens, -1 if rules.eod is None else rules.eod)
        loss_mask = position_ids = document_ids = None
        if rules.eod_mask_loss:
            loss_mask = np.where(is_eod, np.float32(0.0), np.float32(1.0))
        if trained is not None:
            loss_mask = trained if loss_mask is None else loss_mask * trained
        if rules.reset_position_ids:
            position_ids = _positions(is_eod[:, :-1])
        if rules.reset_attention_mask:
            document_ids = np.cumsum(is_eod, axis=1, dtype=np.int64) - is_eod  # number of eod tokens before each token
        return cls(tokens, labels, loss_mask, position_ids, document_ids, sample_ids)

    def ahead(self, count: int) -> Batch:
        """Return what module number `count` (from 1) of multi-token prediction takes in at each position: the token
        `count` positions further, and as its label the one after that, with its place in the loss mask.

        Beyond the end are tokens 0 that do not count, as in Megatron; nor do those of another document, where
        attention stays within documents. In conversations such positions are padding to the module, so that its
        experts see the same tokens however conversations are packed.
        """

        def shifted(array: NDArray[Any]) -> NDArray[Any]:
            moved = np.zeros_like(array)
            moved[:, :-count] = array[:, count:]
            return moved

        mask, documents, padding = self.loss_mask, self.document_ids, self.padding
        mask = shifted(np.ones(self.tokens.shape, dtype=np.float32) if mask is None else mask)
        if documents is not None:
            is_same = np.zeros(documents.shape, dtype=np.bool_)
            is_same[:, :-count] = documents[:, count:] == documents[:, :-count]
            mask *= is_same
            padding = None if padding is None else padding | ~is_same
        return replace(self, tokens=shifted(self.tokens), labels=shifted(self.labels), loss_mask=mask, padding=padding)

    def part(self, held: NDArray[np.int64]) -> Batch:
        """Return the arrays at the positions `held` by one cp rank, and document ids and padding of whole sequences.

        Labels are shifted before, so that the last token of a chunk has the first one of the next as its label.
        """
        mask, positions = self.loss_mask, self.position_ids
        return replace(
            self,
            tokens=self.tokens[:, held],
            labels=self.labels[:, held],
            loss_mask=None if mask is None else mask[:, held],
            position_ids=None if positions is None else positions[:, held],
            loss_tokens=float(self.tokens.size if mask is None else mask.sum(dtype=np.float64)),
        )


def _positions(begins: NDArray[np.bool_]) -> TokenArray:
    """Return positions [micro, seq], from 0 in each document or conversation; the first continues from before.

    begins: [micro, seq - 1], True where one begins at the next position.
    """
    positions = np.arange(begins.shape[1] + 1, dtype=np.int64)
    starts = np.zeros((len(begins), len(positions)), dtype=np.int64)
    starts[:, 1:] = np.where(begins, positions[1:], 0)
    return positions - np.maximum.accumulate(starts, axis=1)


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
