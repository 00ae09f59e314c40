"""Runs that Megatron-Core 0.19.2 trained and saved on CPU, in each of its formats: dense, with experts, and sharded."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.extras.convert.test_megatron_runs import FIXTURES


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the checkpoints; the README of the fixtures says what they are."""
    root = tmp_path_factory.mktemp("megatron_runs")
    for path in FIXTURES.glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            archive.extractall(root, filter="data")
    return root
