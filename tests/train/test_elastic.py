"""A run that is started again on fewer ranks, and then on more: the same batches of the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.config.yaml_file import to_yaml
from megapipe.errors import CheckpointError
from megapipe.train.persistence import load, save
from megapipe.train.schedules import Schedules
from megapipe.train.state import TrainingState
from tests.train.runs import machines_of


def test_a_batch_made_of_the_number_of_ranks_does_not_change_with_it(tmp_path: Path) -> None:
    before = machines_of(0, 1, global_batch_size=None, micro_batch_size=4)  # as two ranks of 2 make it
    config = before.plan.config
    save(before, TrainingState(step=3, consumed_samples=12), Schedules.of(config), tmp_path, to_yaml(config))
    with pytest.raises(CheckpointError, match=r"size 1 would make it 2, but .* was trained with 4: give --global-batch-size 4"):
        load(machines_of(0, 1, global_batch_size=None, micro_batch_size=2), tmp_path)
    assert load(machines_of(0, 1, global_batch_size=4, micro_batch_size=2), tmp_path).state.consumed_samples == 12
