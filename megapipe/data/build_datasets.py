"""The data flags of a run -> its train, valid and test datasets. `--split` and `--data-path` are read as Megatron
does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.config.files import split_shares
from megapipe.data.blend import BlendedDataset, normalize
from megapipe.data.dataset import SyntheticDataset, TokenDataset
from megapipe.data.gpt_dataset import GPTDataset
from megapipe.data.index_cache import IndexCache
from megapipe.data.indexed_file import IndexedFile
from megapipe.errors import ConfigError, DataError

SPLIT_NAMES = ("train", "valid", "test")
SURPLUS = 0.005  # a member of a blend is built with this much more than its share
DEFAULT_SPLIT = "969,30,1"

Range = tuple[float, float]  # part of a file, as fractions of its sequences


@dataclass(frozen=True)
class DatasetRequest:
    """The data flags of a run; exactly one of the three sources is set.

    num_samples: (train, valid, test) for the whole run. Sources: data_path, cut by `split`; train/valid/test_data_path;
    mock_data, which needs `vocab_size`. Paths as the flags give them, weights included.
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
    """The datasets of a run. None: no sample was requested, or the split gives this part nothing."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None


@dataclass(frozen=True)
class Blend:
    """File prefixes with their weights as given (not normalized), or None if none were given."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def build_datasets(request: DatasetRequest) -> Datasets:
    """Build the datasets. Raises ConfigError for contradictory flags, DataError for missing or too small files."""
    per_split = (request.train_data_path, request.valid_data_path, request.test_data_path)
    sources = [request.mock_data, request.data_path is not None, any(path is not None for path in per_split)]
    if sum(sources) != 1:
        ways = "--data-path, --train-data-path/--valid-data-path/--test-data-path, and --mock-data"
        raise ConfigError(f"data must come from exactly one of {ways}; {sum(sources)} of them are given")
    if request.mock_data:
        if request.vocab_size is None:
            raise ConfigError("--mock-data needs the vocabulary size: give --vocab-size or a tokenizer")
        sizes = (request.seq_length, request.vocab_size, request.seed)
        return Datasets(
            *(SyntheticDataset(n, *sizes, part) if n else None for part, n in enumerate(request.num_samples))
        )
    files: dict[str, IndexedFile] = {}
    if request.data_path is not None:
        blend = parse_blend(request.data_path)
        ranges = parse_split(request.split if request.split is not None else DEFAULT_SPLIT)
        return Datasets(*(_build_part(request, part, blend, ranges[part], files) for part in range(3)))
    if request.split is not None:
        rule = "--train/valid/test-data-path are used whole; remove one of them"
        raise ConfigError(f"--split {request.split} cuts the files of --data-path, but {rule}")
    built: list[TokenDataset | None] = []
    for part, path in enumerate(per_split):
        if path is None:
            built.append(None)
            continue
        blend = parse_blend(path, f"--{SPLIT_NAMES[part]}-data-path")
        if len(blend.prefixes) == 1:
            blend = Blend(blend.prefixes, None)  # a single file needs no weight and no surplus
        built.append(_build_part(request, part, blend, (0.0, 1.0), files))
    return Datasets(*built)


def _build_part(
    request: DatasetRequest, part: int, blend: Blend, part_range: Range | None, files: dict[str, IndexedFile]
) -> TokenDataset | None:
    """Build one part of the run: a GPTDataset for a single file without weight, else a blend."""
    num_samples = request.num_samples[part]
    if part_range is None or num_samples == 0:
        return None
    for prefix in blend.prefixes:
        if prefix not in files:
            files[prefix] = IndexedFile(prefix)
    if blend.weights is None and len(blend.prefixes) == 1:
        return _member(request, part, files[blend.prefixes[0]], part_range, num_samples)
    if blend.weights is None:
        # without weights: one epoch of each file; a file without a whole sample in this part contributes none
        members = []
        for prefix in blend.prefixes:
            first, last = sequence_range(part_range, len(files[prefix]))
            if files[prefix].lengths[first:last].any():
                members.append(_member(request, part, files[prefix], part_range, None))
        members = [member for member in members if len(member)]
        weights: Sequence[float] = [len(member) for member in members]
        size = min(num_samples, sum(len(member) for member in members))
        if not members:
            raise DataError(
                f"the {SPLIT_NAMES[part]} part of {' '.join(blend.prefixes)} has no sample of {request.seq_length + 1} "
                "tokens in one epoch; give it a larger share (--split), or give the files weights: several epochs"
            )
    else:
        weights = normalize(blend.weights)
        shares = [math.ceil(num_samples * weight) for weight in weights]
        members = [
            _member(request, part, files[prefix], part_range, math.ceil(share * (1 + SURPLUS)))
            for prefix, share in zip(blend.prefixes, shares, strict=True)
        ]
        size = sum(shares)
    cache = IndexCache.at(request.data_cache_path, blend.prefixes[0])
    return BlendedDataset(members, weights, size, cache=cache, names=[member.file.prefix for member in members])


def _member(
    request: DatasetRequest, part: int, file: IndexedFile, part_range: Range, num_samples: int | None
) -> GPTDataset:
    """Build the dataset of one part of one file; num_samples None: one epoch."""
    first, last = sequence_range(part_range, len(file))
    if first == last:
        raise DataError(
            f"{file.prefix} has {len(file)} sequences, and the {SPLIT_NAMES[part]} part of --split "
            f"{request.split or DEFAULT_SPLIT} holds none of them; give it a larger share, or request no samples of "
            "it (0 in --split, --eval-iters 0)"
        )
    cache = IndexCache.at(request.data_cache_path, file.prefix)
    return GPTDataset(
        file, (first, last), num_samples=num_samples, seq_length=request.seq_length, seed=request.seed, cache=cache
    )


def parse_split(split: str) -> tuple[Range | None, ...]:
    """Parse `"969,30,1"` into ((0, 0.969), (0.969, 0.999), (0.999, 1.0)), with None for an empty part.

    Raises ConfigError if the string is not up to three non-negative numbers with a positive sum.
    """
    ranges: list[Range | None] = []
    start = 0.0
    for share in split_shares(split):
        ranges.append((start, start + share) if share > 0 else None)
        start += share
    return tuple(ranges)


def sequence_range(part_range: Range, num_sequences: int) -> tuple[int, int]:
    """Return [first, last) of the sequences of one part of a file."""
    return round(part_range[0] * float(num_sequences)), round(part_range[1] * float(num_sequences))


def parse_blend(values: Sequence[str], flag: str = "--data-path") -> Blend:
    """Parse `["0.3", "A", "0.7", "B"]` or `["A", "B"]`.

    An odd number of values, or one without any number in the positions of weights, is a list of prefixes. Raises
    ConfigError if only some files have weights, or weights are negative or all zero.
    """
    values = [str(value).strip() for value in values]
    if not values or not all(values):
        forms = "PREFIX, PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ..."
        raise ConfigError(f"{flag} needs at least one file prefix: {forms}")
    numbers = [_number(value) for value in values[::2]]
    if len(values) % 2 == 1 or all(number is None for number in numbers):
        if len(values) > 1 and any(_number(value) is not None for value in values):
            rule = "write WEIGHT PREFIX for every file, or prefixes only"
            raise ConfigError(f"{flag} {' '.join(values)}: a weight without its prefix; {rule}")
        return Blend(tuple(values), None)
    weights = [number for number in numbers if number is not None]
    if len(weights) != len(numbers):
        rule = "give WEIGHT PREFIX for every file"
        raise ConfigError(f"{flag} {' '.join(values)}: some files have a weight and some have none; {rule}")
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or sum(weights) <= 0:
        raise ConfigError(f"{flag}: weights {weights} must be non-negative and not all zero")
    return Blend(tuple(values[1::2]), tuple(weights))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
