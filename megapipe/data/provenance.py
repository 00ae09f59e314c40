"""From a sample to the tokens of files that it holds, and back from a document to the samples that hold some of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megapipe.data.blend import BlendedDataset
from megapipe.data.dataset import Array, TokenDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.indexed_file import IndexedFile


@dataclass(frozen=True)
class Piece:
    """Tokens first_token .. past_token of a document of a file, which stand at `position` of the sample. sequence:
    the file's sequence that the document is, or a part of it, as in Megatron's index.
    """

    prefix: str
    document: int
    sequence: int
    first_token: int
    past_token: int
    position: int


def pieces_of(dataset: TokenDataset, index: int) -> tuple[Piece, ...]:
    """What item `index` consists of, in order; nothing of a synthetic data set. Their lengths add up to seq_length +
    1.
    """
    if isinstance(dataset, BlendedDataset):
        return pieces_of(dataset.members[int(dataset.dataset_index[index])], int(dataset.sample_index[index]))
    if not isinstance(dataset, GPTDataset):
        return ()
    found: list[Piece] = []
    place, offset = dataset.index.locate(int(dataset.index.shuffle[index]) * dataset.seq_length)
    position = 0
    while position <= dataset.seq_length:
        sequence = int(dataset.index.documents[place])
        count = min(int(dataset.file.lengths[sequence]) - offset, dataset.seq_length + 1 - position)
        if count:
            start = offset + _start_in_document(dataset.file, sequence)
            document = document_of(dataset.file, sequence)
            found.append(Piece(dataset.file.prefix, document, sequence, start, start + count, position))
        position, place, offset = position + count, place + 1, 0
    return tuple(found)


def samples_of(dataset: TokenDataset, prefix: str, document: int) -> list[int]:
    """All items that hold a token of the document, ascending. Reads the shuffled indices once."""
    if isinstance(dataset, BlendedDataset):
        found: list[int] = []
        for number, member in enumerate(dataset.members):
            inside = samples_of(member, prefix, document)
            if inside:
                own = np.flatnonzero(dataset.dataset_index == number)
                found += own[np.isin(dataset.sample_index[own], inside)].tolist()
        return sorted(found)
    if not isinstance(dataset, GPTDataset) or dataset.file.prefix != prefix:
        return []
    in_stream = sorted(set(_stream_samples(dataset, document)))
    return np.flatnonzero(np.isin(dataset.index.shuffle, np.array(in_stream, dtype=np.int64))).tolist()


def files_of(dataset: TokenDataset) -> dict[str, IndexedFile]:
    """By prefix."""
    members = dataset.members if isinstance(dataset, BlendedDataset) else (dataset,)
    return {member.file.prefix: member.file for member in members if isinstance(member, GPTDataset)}


def document_of(file: IndexedFile, sequence: int) -> int:
    """The document that a sequence is in."""
    return int(np.searchsorted(file.documents, sequence, side="right")) - 1


def _start_in_document(file: IndexedFile, sequence: int) -> int:
    first = int(file.documents[document_of(file, sequence)])
    return int(file.lengths[first:sequence].sum(dtype=np.int64))


def _stream_samples(dataset: GPTDataset, document: int) -> Iterator[int]:
    """Sample k of the stream holds tokens k seq .. k seq + seq, one of them shared with the next."""
    documents: Array = dataset.file.documents
    ends, seq = dataset.index.ends, dataset.seq_length
    sequences = np.arange(documents[document], documents[document + 1])
    for place in np.flatnonzero(np.isin(dataset.index.documents, sequences)).tolist():
        past = int(ends[place])
        first = past - int(dataset.file.lengths[dataset.index.documents[place]])
        if past > first:
            yield from range(max(0, -(-(first - seq) // seq)), min((past - 1) // seq, len(dataset) - 1) + 1)
