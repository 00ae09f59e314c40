"""Samples that Megatron-Core drew from the token files in tests/fixtures/megatron_data, and small token files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.config.files import DataConfig
from megapipe.data.build_datasets import DatasetRequest
from megapipe.data.indexed_file import IndexedFile
from tests.token_files import IndexedWriter

FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "megatron_data"
RUNS = ("single_1epoch", "single_2p5epoch", "blend_weights")


def expected(run: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"expect_{run}.json").read_text())


def request_of(run: str, cache: Path) -> DatasetRequest:
    """Build the request that corresponds to the flags Megatron was given."""
    known = expected(run)
    names, weights = known["blend"]
    prefixes = [str(FOLDER / name) for name in names]
    path = (
        prefixes
        if weights is None
        else [word for pair in zip(weights, prefixes, strict=True) for word in map(str, pair)]
    )
    data = DataConfig(data_path=tuple(path), split=known["split"], data_cache_path=str(cache))
    return DatasetRequest(data, known["seq"], known["seed"], tuple(known["sizes"]))


def changed(request: DatasetRequest, **changes: Any) -> DatasetRequest:
    """Return the request with other data flags, and other num_samples."""
    num_samples = changes.pop("num_samples", request.num_samples)
    return replace(request, data=replace(request.data, **changes), num_samples=num_samples)


def write_file(prefix: Path, lengths: list[int], dtype: str = "u2") -> IndexedFile:
    """Write documents of the given lengths; the tokens count up from 0 across all of them."""
    start = 0
    with IndexedWriter(prefix, dtype) as writer:
        for length in lengths:
            writer.add_document(np.arange(start, start + length))
            start += length
    return IndexedFile(prefix)
