"""A job that its launcher starts again: its starts are counted, it goes on from what it saved last, and one that comes no further ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megapipe.checkpoint.folder import steps_in
from megapipe.checkpoint.starts import Starts, count_start, no_progress_error
from megapipe.comm.collectives import broadcast_object
from megapipe.comm.groups import Group
from megapipe.config.checkpoint import CheckpointConfig
from megapipe.config.config import Config
from megapipe.environment import Environment
from megapipe.errors import CheckpointError
from megapipe.train.run_log import last_failure
from megapipe.train.writers import recorded_folder

Counted = Starts | CheckpointError | None  # by rank 0; None: nothing is saved, so that there is nothing to count


def count(config: Config, environment: Environment) -> Counted:
    """Count this start on rank 0, before it meets the others: so that one which fails to meet them is counted, too."""
    if environment.global_rank != 0 or config.checkpoint.save is None or config.training.skip_train:
        return None
    try:
        return count_start(Path(config.checkpoint.save), environment.job, environment.restart_count > 0)
    except CheckpointError as error:
        return error


def agreed(counted: Counted, config: Config, world: Group) -> Starts | None:
    """Rank 0's count on all ranks. Raises NoProgressError, or rank 0's CheckpointError, on all of them."""
    starts: Counted = broadcast_object(counted, world)
    if isinstance(starts, CheckpointError):
        raise starts
    if starts is not None and starts.exhausted:
        assert config.checkpoint.save is not None
        folder = recorded_folder(config)
        last_words = None if folder is None else last_failure(folder, starts.times[0])
        raise no_progress_error(starts, Path(config.checkpoint.save), last_words)
    return starts


def flags_to_load_with(flags: CheckpointConfig, starts: Starts | None) -> tuple[CheckpointConfig, str]:
    """What the flags of a restart come to, and a remark where that is not what they say: what the job has saved itself comes before
    what --load, --ckpt-step and --finetune began it with."""
    if starts is None or not starts.is_restart or flags.save is None or not steps_in(Path(flags.save)):
        return flags, ""
    again = dataclasses.replace(
        flags, load=flags.save, ckpt_step=None, finetune=False, no_load_optim=False, no_load_rng=False
    )
    if again == flags:
        return flags, ""
    return (
        again,
        f"a restart: going on from --save {flags.save}, whatever --load and the flags with it say of the first start",
    )
