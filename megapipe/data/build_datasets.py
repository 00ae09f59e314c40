"""From what a user asked for to the train, valid and test data sets of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.data.blend import BlendedDataset
from megapipe.data.dataset import TokenDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.index_cache import IndexCache
from megapipe.data.indexed_file import IndexedFile
from megapipe.data.split import SPLIT_NAMES, Blend, normalize, parse_blend, parse_split, sequence_range
from megapipe.data.synthetic import SyntheticDataset
from megapipe.errors import ConfigError, DataError

SURPLUS = 0.005  # a member of a blend is built for this much more than its share
DEFAULT_SPLIT = "969,30,1"
WHOLE = (0.0, 1.0)


@dataclass(frozen=True)
class DatasetRequest:
    """num_samples: (train, valid, test) asked for over the whole run. Paths as the flags give them, weights included.

    data_path goes with `split`; train/valid/test_data_path give each part its own files instead; mock_data needs `vocab_size`.
    """

    seq_length: int
    seed: int
    num_samples: tuple[int, int, int]
    data_path: Sequence[str] | None = None
    split: str | None = None
    train_data_path: Sequence[str] | None = None
    valid_data_path: Sequence[str] | None = None
    test_data_path: Sequence[str] | None = None
    data_cache_path: str | None = None
    mock_data: bool = False
    vocab_size: int | None = None


@dataclass(frozen=True)
class Datasets:
    """None where no sample was asked for, or the split gives that part nothing."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None


def build_datasets(request: DatasetRequest) -> Datasets:
    """Raises ConfigError for contradicting wishes, DataError for files that are missing or hold too little."""
    per_split = (request.train_data_path, request.valid_data_path, request.test_data_path)
    sources = [request.mock_data, request.data_path is not None, any(path is not None for path in per_split)]
    if sum(sources) != 1:
        raise ConfigError(
            "data must come from exactly one of --data-path, --train-data-path/--valid-data-path/--test-data-path, and --mock-data; "
            f"{sum(sources)} of them are given"
        )
    if request.mock_data:
        return Datasets(*(_synthetic(request, part) for part in range(3)))
    files: dict[str, IndexedFile] = {}
    if request.data_path is not None:
        blend = parse_blend(request.data_path)
        bookends = parse_split(request.split if request.split is not None else DEFAULT_SPLIT)
        return Datasets(*(_build_part(request, part, blend, bookends[part], files) for part in range(3)))
    if request.split is not None:
        raise ConfigError(
            f"--split {request.split} cuts the files of --data-path; --train/valid/test-data-path are used whole: leave one out"
        )
    built = []
    for part, path in enumerate(per_split):
        part_blend = None if path is None else parse_blend(path, f"--{SPLIT_NAMES[part]}-data-path")
        if part_blend is not None and len(part_blend.prefixes) == 1:
            part_blend = Blend(part_blend.prefixes, None)  # one file needs no weight here, and takes no surplus
        built.append(None if part_blend is None else _build_part(request, part, part_blend, WHOLE, files))
    return Datasets(*built)


def _synthetic(request: DatasetRequest, part: int) -> SyntheticDataset | None:
    if request.vocab_size is None:
        raise ConfigError("--mock-data needs the vocabulary size: give --vocab-size or a tokenizer")
    num_samples = request.num_samples[part]
    return (
        SyntheticDataset(num_samples, request.seq_length, request.vocab_size, request.seed, part)
        if num_samples
        else None
    )


def _build_part(
    request: DatasetRequest, part: int, blend: Blend, bookend: tuple[float, float] | None, files: dict[str, IndexedFile]
) -> TokenDataset | None:
    """One part of the run: a file alone where one prefix stands without a weight, else a blend."""
    num_samples = request.num_samples[part]
    if bookend is None or num_samples == 0:
        return None
    for prefix in blend.prefixes:
        if prefix not in files:
            files[prefix] = IndexedFile(prefix)
    if blend.weights is None and len(blend.prefixes) == 1:
        return _member(request, part, files[blend.prefixes[0]], bookend, num_samples)
    if blend.weights is None:
        # a file too small to have a sample of this part in one epoch gives none
        one_epoch = [_one_epoch(request, files[prefix], bookend) for prefix in blend.prefixes]
        members = [member for member in one_epoch if member is not None and len(member)]
        weights: Sequence[float] = [len(member) for member in members]
        size = min(num_samples, sum(len(member) for member in members))
        if not members:
            raise DataError(
                f"the {SPLIT_NAMES[part]} part of {' '.join(blend.prefixes)} has no sample of {request.seq_length + 1} tokens in "
                f"one epoch; give it a larger share (--split), or give the files weights, which allow more epochs"
            )
    else:
        weights = normalize(blend.weights)
        shares = [math.ceil(num_samples * weight) for weight in weights]
        buffers = [math.ceil(share * (1 + SURPLUS)) for share in shares]
        members = [
            _member(request, part, files[prefix], bookend, asked)
            for prefix, asked in zip(blend.prefixes, buffers, strict=True)
        ]
        size = sum(shares)
    cache = IndexCache.at(request.data_cache_path, blend.prefixes[0])
    return BlendedDataset(members, weights, size, cache=cache, names=[member.file.prefix for member in members])


def _one_epoch(request: DatasetRequest, file: IndexedFile, bookend: tuple[float, float]) -> GPTDataset | None:
    """One epoch of a part of a file, or None where that part has no token."""
    first, last = sequence_range(bookend, len(file))
    if not file.lengths[first:last].any():
        return None
    cache = IndexCache.at(request.data_cache_path, file.prefix)
    return GPTDataset(
        file, (first, last), num_samples=None, seq_length=request.seq_length, seed=request.seed, cache=cache
    )


def _member(
    request: DatasetRequest, part: int, file: IndexedFile, bookend: tuple[float, float], num_samples: int
) -> GPTDataset:
    first, last = sequence_range(bookend, len(file))
    if first == last:
        raise DataError(
            f"{file.prefix} has {len(file)} sequences, and the {SPLIT_NAMES[part]} part of --split {request.split or DEFAULT_SPLIT} "
            f"holds none of them, but samples are asked of it; give it a larger share, or ask for none (--split with 0, --eval-iters 0)"
        )
    cache = IndexCache.at(request.data_cache_path, file.prefix)
    return GPTDataset(
        file, (first, last), num_samples=num_samples, seq_length=request.seq_length, seed=request.seed, cache=cache
    )
