"""`ChatDataset`: conversations packed into sequences, and the chat datasets of a run.

Epoch e shuffles the conversations by (seed, part, e), packs them, and shuffles the sequences. So every epoch holds each
conversation once, no sequence spans two epochs, and a longer run begins like a shorter one. A sequence of seq_length
holds conversations of up to seq_length + 1 tokens together, since the last token is only a label.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megapipe.config.files import parse_blend
from megapipe.data.batch import CHAT_ROWS, PADDING
from megapipe.data.build_datasets import (
    DEFAULT_SPLIT,
    SPLIT_NAMES,
    DatasetRequest,
    Datasets,
    build_blend,
    paths_of_parts,
    sequence_range,
)
from megapipe.data.chat import NOTES, ChatFile, open_chats
from megapipe.data.dataset import Array, TokenArray, TokenDataset
from megapipe.data.index_cache import Arrays, IndexCache, file_stamp
from megapipe.errors import DataError
from megapipe.tokenizers.chat import ChatTokenizer

OPEN_SEQUENCES = 256  # sequences that packing fills at the same time
CHECKED_CHATS = 4096  # conversations at the beginning whose order the fingerprint holds
CHECKED_TOKENS = 1 << 22  # tokens, evenly spaced, whose values it holds; all of a smaller file
REFUSE, DROP, TRUNCATE = "refuse", "drop", "truncate"


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack by best fit: each item goes to the open sequence with the least room that takes it, else to a new one.

    With more than OPEN_SEQUENCES open, the fullest is closed. Returns the items of each sequence.
    """
    sequences: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, number) of the open sequences, ascending
    for item, length in enumerate(lengths):
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = capacity, len(sequences)
            sequences.append([])
        sequences[number].append(item)
        insort(rooms, (room - length, number))
        if len(rooms) > OPEN_SEQUENCES:
            rooms.pop(0)
    return sequences


@dataclass(frozen=True)
class Selection:
    """The conversations of one part of a file that are trained on, and the numbers of those that are not."""

    numbers: Array  # [kept] int64: numbers in the file
    lengths: Array  # [kept] int64: tokens of each, after truncation
    num_long: int  # dropped or truncated for their length
    num_untrained: int  # left out because no token is trained (after truncation)


def select(file: ChatFile, first: int, past: int, seq_length: int, overlong: str) -> Selection:
    """Choose among conversations [first, past). Raises DataError if some are too long and `overlong` is "refuse"."""
    lengths = np.diff(file.starts[first : past + 1])
    limit = seq_length + 1
    is_long = lengths > limit
    num_long = int(is_long.sum())
    if num_long and overlong == REFUSE:
        raise DataError(
            f"{file.path}: {num_long} of {past - first} conversations are longer than --seq-length {seq_length} (the "
            f"longest has {int(lengths.max())} tokens); give --sft-overlong drop or truncate, or a larger --seq-length"
        )
    trained = np.asarray(file.first_trained[first:past]) < np.minimum(lengths, limit)
    kept = trained & ~is_long if overlong == DROP else trained
    numbers = first + np.flatnonzero(kept).astype(np.int64)
    if not len(numbers):
        raise DataError(
            f"{file.path}: none of {past - first} conversations has a token of an answer within --seq-length "
            f"{seq_length} (--sft-overlong {overlong}); give a larger --seq-length"
        )
    num_untrained = int((~trained & ~is_long).sum() if overlong == DROP else (~trained).sum())
    return Selection(numbers, np.minimum(lengths, limit)[kept], num_long, num_untrained)


class ChatDataset:
    """Conversations [first, past) of a file as samples of CHAT_ROWS x (seq_length + 1), see `Batch.of`.

    num_samples None: one epoch; else as many whole epochs as it needs. packs False: one conversation in a sequence.
    pad: the token of padding, which is in no loss, seen by no other token, and sent to no expert.
    """

    def __init__(
        self,
        file: ChatFile,
        chats: tuple[int, int],
        *,
        num_samples: int | None,
        seq_length: int,
        seed: tuple[int, int],
        overlong: str = REFUSE,
        packs: bool = True,
        pad: int = 0,
        cache: IndexCache | None = None,
        key: dict[str, Any] | None = None,
    ) -> None:
        self.file, self.chats, self.seq_length, self.seed, self.pad = file, chats, seq_length, seed, pad
        self.packs, self.overlong = packs, overlong
        self.selection = select(file, *chats, seq_length, overlong)
        self._cache, self._key = cache, key or {}
        self._index(num_samples or 0)
        self.num_requested = len(self) if num_samples is None else num_samples

    def _index(self, num_samples: int) -> None:
        """Set `_order`, places in the selection as they are read, and `_bounds`, [samples + 1], of each sample."""

        def build() -> Arrays:
            lengths, count = self.selection.lengths, len(self.selection.numbers)
            order, sizes = [], [np.zeros(1, dtype=np.int64)]
            total = epoch = 0
            while epoch == 0 or total < num_samples:
                random = np.random.default_rng([*self.seed, epoch])
                shuffled = random.permutation(count)
                items = [[i] for i in range(count)]
                if self.packs:
                    items = pack(lengths[shuffled].tolist(), self.seq_length + 1)
                arranged = [items[i] for i in random.permutation(len(items))]
                order.append(shuffled[[item for sequence in arranged for item in sequence]].astype(np.int64))
                sizes.append(np.array([len(sequence) for sequence in arranged], dtype=np.int64))
                total, epoch = total + len(items), epoch + 1
            return {"order": np.concatenate(order), "bounds": np.cumsum(np.concatenate(sizes))}

        description = {
            **self._key,
            "chats": self.chats,
            "num_samples": num_samples,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "overlong": self.overlong,
            "packs": self.packs,
        }
        arrays = build() if self._cache is None else self._cache.arrays("packed", description, build)
        self._order, self._bounds = arrays["order"], arrays["bounds"]
        self.num_epochs = len(self._order) // len(self.selection.numbers)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def grow(self, size: int) -> None:
        """Add whole epochs until there are `size` samples."""
        if size > len(self):
            self._index(size)

    def members(self, index: int) -> list[tuple[int, int]]:
        """Return the conversations of a sample: (number in the file, tokens)."""
        kept = self._order[self._bounds[index] : self._bounds[index + 1]]
        return [(int(self.selection.numbers[i]), int(self.selection.lengths[i])) for i in kept]

    def __getitem__(self, index: int) -> TokenArray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)} samples ({self.file.path})")
        sample = np.zeros((CHAT_ROWS, self.seq_length + 1), dtype=np.int64)
        sample[0], filled = self.pad, 0
        members = self.members(index)
        for place, (number, length) in enumerate(members):
            start = int(self.file.starts[number])
            sample[0, filled : filled + length] = self.file.tokens[start : start + length]
            sample[1, filled : filled + length] = self.file.trained[start : start + length]
            sample[2, filled : filled + length] = place
            filled += length
        sample[2, filled:] = PADDING  # counts as another conversation
        return sample

    def describe(self) -> str:
        """Return a line on the conversations and how they were packed."""
        kept, per_epoch = len(self.selection.numbers), len(self) / self.num_epochs
        tokens = int(self.selection.lengths.sum())
        fill = tokens / (per_epoch * (self.seq_length + 1))
        first, past = self.chats
        text = f"{self.file.path}: {kept:,} conversations of {tokens:,} tokens in {per_epoch:,.0f} sequences an epoch"
        notes = [f"{fill:.1%} full", f"{self.num_requested / per_epoch:.3g} epochs are asked for"]
        if self.selection.num_long:
            how = {DROP: "dropped", TRUNCATE: "truncated"}[self.overlong]
            notes.append(f"{self.selection.num_long:,} of {past - first:,} too long: {how}")
        if self.selection.num_untrained:
            notes.append(f"{self.selection.num_untrained:,} left out: no token of an answer is left")
        notes += [f"{count:,} {note}" for note, count in zip(NOTES, self.file.counts, strict=True) if count]
        return f"{text} ({'; '.join(notes)})"

    def fingerprint(self, share: float) -> dict[str, Any]:
        """Return the entry of this file in the fingerprint of the data, see `data.fingerprint`."""
        file, count = self.file, min(len(self.selection.numbers), CHECKED_CHATS)  # of the first epoch
        bounds = self._bounds[: np.searchsorted(self._bounds, count, side="right")]
        sampled = slice(None, None, max(1, len(file.tokens) // CHECKED_TOKENS))
        order = zlib.crc32(self._order[:count].astype("<i8").tobytes())
        return {
            "share": round(share, 12),
            "prefix": file.path,
            "sequences": list(self.chats),
            "bytes": [len(file.tokens) * file.tokens.dtype.itemsize, len(file.starts) * 8],
            "index": zlib.crc32(np.ascontiguousarray(file.starts[sampled]).tobytes()),
            "tokens": zlib.crc32((2 * file.tokens[sampled].astype("<i8") + file.trained[sampled]).tobytes()),
            "order": zlib.crc32(bounds.astype("<i8").tobytes(), order),
        }


def build_chat_datasets(request: DatasetRequest, encoder: ChatTokenizer) -> tuple[Datasets, tuple[str, ...]]:
    """Build the datasets of a run of --sft, and a line on each. Raises ConfigError, DataError."""
    data = request.data
    built: list[TokenDataset | None] = [None] * 3
    lines: list[str] = []
    files: dict[str, ChatFile] = {}
    for part, (words, flag, part_range) in enumerate(paths_of_parts(data)):
        if not words or part_range is None or not request.num_samples[part]:
            continue
        names, weights = parse_blend(words, flag)
        for name in names:
            if name not in files:
                files[name] = open_chats(name, encoder, IndexCache.at(data.data_cache_path, name))

        def build(name: str, count: int | None, part: int = part, part_range: Any = part_range) -> ChatDataset:
            file = files[name]
            first, past = sequence_range(part_range, len(file))
            if first == past:
                empty = f"--split {data.split or DEFAULT_SPLIT} gives its {SPLIT_NAMES[part]} part none of them"
                way = "give it a larger share, or request no samples of it (0 in --split, --eval-iters 0)"
                raise DataError(f"{name} has {len(file)} conversations, and {empty}; {way}")
            cache = IndexCache.at(data.data_cache_path, name)
            pad = next((token for token in (encoder.pad, encoder.eod) if token is not None), 0)
            found = ChatDataset(
                file,
                (first, past),
                num_samples=count,
                seq_length=request.seq_length,
                seed=(request.seed, part),
                overlong=data.sft_overlong,
                packs=data.sft_packing,
                pad=pad,
                cache=cache,
                key={**file_stamp(file.path), "encoder": encoder.key},
            )
            lines.append(f"{SPLIT_NAMES[part]}: {found.describe()}")
            return found

        if len(names) == 1:
            weights = None  # a single file needs no surplus
        built[part] = build_blend(names, weights, request.num_samples[part], build, data.data_cache_path)
    return Datasets(*built), tuple(lines)
