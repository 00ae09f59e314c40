"""The data flags of a run -> its train, valid and test datasets, by Megatron's rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megapipe.config.files import DATASETS, DataConfig, parse_blend, split_shares
from megapipe.data.blend import BlendedDataset, normalize
from megapipe.data.dataset import SyntheticDataset, TokenDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.index_cache import IndexCache
from megapipe.data.indexed_file import IndexedFile
from megapipe.data.registered import DatasetPart, options_of
from megapipe.errors import ConfigError, DataError

SPLIT_NAMES = ("train", "valid", "test")
SURPLUS = 0.005  # a member of a blend is built with this much more than its share
DEFAULT_SPLIT = "969,30,1"

Range = tuple[float, float]  # part of a file, as fractions of its sequences


@dataclass(frozen=True)
class DatasetRequest:
    """The data flags of a run, of which one names the source: data_path, paths of the parts or mock_data; its sizes."""

    data: DataConfig
    seq_length: int
    seed: int
    num_samples: tuple[int, int, int]  # train, valid, test, for the whole run
    vocab_size: int | None = None  # needed by mock_data


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run. None: no sample was requested, or the split gives this part nothing."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None


def build_datasets(request: DatasetRequest) -> Datasets:
    """Build the datasets. Raises ConfigError for contradictory flags, DataError for missing or too small files."""
    data = request.data
    part_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.dataset is not None:
        return _registered(request)
    sources = [data.mock_data, data.data_path is not None, any(path is not None for path in part_paths)]
    if sum(sources) != 1:
        ways = "--data-path, --train-data-path/--valid-data-path/--test-data-path, and --mock-data"
        raise ConfigError(f"data must come from exactly one of {ways}; {sum(sources)} of them are given")
    if data.mock_data:
        if request.vocab_size is None:
            raise ConfigError("--mock-data needs the vocabulary size: give --vocab-size or a tokenizer")
        sizes = (request.seq_length, request.vocab_size, request.seed)
        numbers = enumerate(request.num_samples)
        return Datasets(*(SyntheticDataset(number, *sizes, part) if number else None for part, number in numbers))
    # the parts share their files; who builds the index of a part checks the file
    open_file = functools.cache(functools.partial(IndexedFile, check=False))
    if data.data_path is not None:
        blend = parse_blend(data.data_path, "--data-path")
        ranges = parse_split(data.split or DEFAULT_SPLIT)
        return Datasets(*(_build_part(request, part, *blend, ranges[part], open_file) for part in range(3)))
    built: list[TokenDataset | None] = [None] * 3
    for part, path in enumerate(part_paths):
        if path is not None:
            prefixes, weights = parse_blend(path, f"--{SPLIT_NAMES[part]}-data-path")
            if len(prefixes) == 1:
                weights = None  # a single file needs no weight and no surplus
            built[part] = _build_part(request, part, prefixes, weights, (0.0, 1.0), open_file)
    return Datasets(*built)


def _registered(request: DatasetRequest) -> Datasets:
    """Build the parts of --dataset."""
    assert request.data.dataset is not None
    if request.vocab_size is None:
        raise ConfigError("--dataset needs the vocabulary size: give --vocab-size or a tokenizer")
    build, options = DATASETS[request.data.dataset].build, options_of(request.data.dataset_options)
    sizes = (request.seq_length, request.vocab_size, request.seed, options)
    parts = zip(SPLIT_NAMES, request.num_samples, strict=True)
    return Datasets(*(build(DatasetPart(name, number, *sizes)) if number else None for name, number in parts))


def _build_part(
    request: DatasetRequest,
    part: int,
    prefixes: list[str],
    weights: Sequence[float] | None,
    part_range: Range | None,
    open_file: Callable[[str], IndexedFile],
) -> TokenDataset | None:
    """Build one part of the run: a GPTDataset for a single file without weight, else a blend."""
    num_samples = request.num_samples[part]
    if part_range is None or num_samples == 0:
        return None
    files = [open_file(prefix) for prefix in prefixes]
    if weights is None and len(files) == 1:
        return _member(request, part, files[0], part_range, num_samples)
    if weights is None:
        # without weights: one epoch of each file; a file without a whole sample in this part contributes none
        members = []
        for file in files:
            first, last = sequence_range(part_range, len(file))
            if file.has_tokens(first, last):
                members.append(_member(request, part, file, part_range, None))
        members = [member for member in members if len(member)]
        weights = [len(member) for member in members]
        size = min(num_samples, sum(len(member) for member in members))
        if not members:
            lacking = f"has no sample of {request.seq_length + 1} tokens in one epoch"
            way = "give it a larger share (--split), or give the files weights: several epochs"
            raise DataError(f"the {SPLIT_NAMES[part]} part of {' '.join(prefixes)} {lacking}; {way}")
    else:
        weights = normalize(weights)
        shares = [math.ceil(num_samples * weight) for weight in weights]
        members = [
            _member(request, part, file, part_range, math.ceil(share * (1 + SURPLUS)))
            for file, share in zip(files, shares, strict=True)
        ]
        size = sum(shares)
    cache = IndexCache.at(request.data.data_cache_path, prefixes[0])
    return BlendedDataset(members, weights, size, names=[member.file.prefix for member in members], cache=cache)


def _member(
    request: DatasetRequest, part: int, file: IndexedFile, part_range: Range, num_samples: int | None
) -> GPTDataset:
    """Build the dataset of one part of one file; num_samples None: one epoch."""
    first, last = sequence_range(part_range, len(file))
    if first == last:
        empty = f"the {SPLIT_NAMES[part]} part of --split {request.data.split or DEFAULT_SPLIT} holds none of them"
        way = "give it a larger share, or request no samples of it (0 in --split, --eval-iters 0)"
        raise DataError(f"{file.prefix} has {len(file)} sequences, and {empty}; {way}")
    cache = IndexCache.at(request.data.data_cache_path, file.prefix)
    return GPTDataset(
        file, (first, last), num_samples=num_samples, seq_length=request.seq_length, seed=request.seed, cache=cache
    )


def parse_split(split: str) -> tuple[Range | None, ...]:
    """Parse `"969,30,1"` into ((0, 0.969), (0.969, 0.999), (0.999, 1.0)), with None for an empty part."""
    ranges: list[Range | None] = []
    start = 0.0
    for share in split_shares(split):
        ranges.append((start, start + share) if share > 0 else None)
        start += share
    return tuple(ranges)


def sequence_range(part_range: Range, num_sequences: int) -> tuple[int, int]:
    """Return [first, last) of the sequences of one part of a file."""
    return round(part_range[0] * float(num_sequences)), round(part_range[1] * float(num_sequences))
