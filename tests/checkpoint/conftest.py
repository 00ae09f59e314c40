"""A checkpoint that several files resume from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.jobs import job

RUN = "--train-iters 4 --lr-decay-style constant"


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that ended after two of four steps; it is only read."""
    root = tmp_path_factory.mktemp("saved")
    assert job(f"{RUN} --exit-interval 2 --save {root}")[0] == 0
    return root
