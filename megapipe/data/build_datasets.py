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
    if data.dataset is not None:
        if request.vocab_size is None:
            raise ConfigError("--dataset needs the vocabulary size: give --vocab-size or a tokenizer")
        build, options = DATASETS[data.dataset].build, options_of(data.dataset_options)
        wanted = (request.seq_length, request.vocab_size, request.seed, options)
        named = zip(SPLIT_NAMES, request.num_samples, strict=True)
        return Datasets(*(build(DatasetPart(name, number, *wanted)) if number else None for name, number in named))
    part_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
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
    built: list[TokenDataset | None] = [None] * 3
    for part, (words, flag, part_range) in enumerate(paths_of_parts(data)):
        if words is not None:
            prefixes, weights = parse_blend(words, flag)
            if data.data_path is None and len(prefixes) == 1:
                weights = None  # a single file needs no weight and no surplus
            if part_range is not None and request.num_samples[part]:
                built[part] = _build_part(request, part, prefixes, weights, part_range, open_file)
    return Datasets(*built)


def paths_of_parts(data: DataConfig) -> list[tuple[Sequence[str] | None, str, Range | None]]:
    """Return the words of train, valid and test, their flag, and the range of the files.

    Words are None for a part without files, ranges for an empty part of --split.
    """
    if data.data_path is not None:
        return [(data.data_path, "--data-path", part) for part in parse_split(data.split or DEFAULT_SPLIT)]
    given = (data.train_data_path, data.valid_data_path, data.test_data_path)
    return [(words, f"--{name}-data-path", (0.0, 1.0)) for words, name in zip(given, SPLIT_NAMES, strict=True)]


def _build_part(
    request: DatasetRequest,
    part: int,
    prefixes: list[str],
    weights: Sequence[float] | None,
    part_range: Range,
    open_file: Callable[[str], IndexedFile],
) -> TokenDataset:
    """Build one part of the run from token files."""
    files = {prefix: open_file(prefix) for prefix in prefixes}  # a missing one is found before an index is built

    def build(prefix: str, count: int | None) -> GPTDataset | None:
        file = files[prefix]
        first, last = sequence_range(part_range, len(file))
        if count is None and not file.has_tokens(first, last):
            return None
        if first == last:
            empty = f"the {SPLIT_NAMES[part]} part of --split {request.data.split or DEFAULT_SPLIT} holds none of them"
            way = "give it a larger share, or request no samples of it (0 in --split, --eval-iters 0)"
            raise DataError(f"{prefix} has {len(file)} sequences, and {empty}; {way}")
        cache, seq = IndexCache.at(request.data.data_cache_path, prefix), request.seq_length
        found = GPTDataset(file, (first, last), num_samples=count, seq_length=seq, seed=request.seed, cache=cache)
        return found if count is not None or len(found) else None

    built = build_blend(prefixes, weights, request.num_samples[part], build, request.data.data_cache_path)
    if built is None:
        lacking = f"has no sample of {request.seq_length + 1} tokens in one epoch"
        way = "give it a larger share (--split), or give the files weights: several epochs"
        raise DataError(f"the {SPLIT_NAMES[part]} part of {' '.join(prefixes)} {lacking}; {way}")
    return built


def build_blend(
    names: Sequence[str],
    weights: Sequence[float] | None,
    num_samples: int,
    build: Callable[[str, int | None], TokenDataset | None],
    cache_path: str | None,
) -> TokenDataset | None:
    """Build the dataset of a single file without weight, or a blend; without weights it has one epoch of each file.

    build: makes the dataset of a file, of so many samples; None: one epoch, and None if that holds no sample. Such
    files contribute nothing; returns None if none is left.
    """
    if weights is None and len(names) == 1:
        return build(names[0], num_samples)
    wanted = None if weights is None else [math.ceil(num_samples * share) for share in normalize(weights)]
    counts: Sequence[int | None] = (
        [None] * len(names) if wanted is None else [math.ceil(count * (1 + SURPLUS)) for count in wanted]
    )
    built = [(name, build(name, count)) for name, count in zip(names, counts, strict=True)]
    held = [name for name, member in built if member is not None]
    members = [member for _, member in built if member is not None]
    if not members:
        return None
    lengths = [len(member) for member in members]
    shares: Sequence[float] = lengths if weights is None else normalize(weights)
    size = min(num_samples, sum(lengths)) if wanted is None else sum(wanted)
    return BlendedDataset(members, shares, size, names=held, cache=IndexCache.at(cache_path, names[0]))


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
