"""The checkpoint section: where state is saved to and loaded from."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Flag, option


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and what is taken from a checkpoint."""

    save: str | None = option(None, "directory to save checkpoints in")
    load: str | None = option(None, "directory to load a checkpoint from")
    save_interval: int | None = option(
        None,
        "steps between checkpoints; unset: only at the end",
        unit="steps",
        at_least=1,
        more_flags=(Flag("--persistent-save-interval", help="same as --save-interval"),),
    )
    save_interval_minutes: float | None = option(
        None,
        "time between checkpoints, by itself or beside --save-interval; saved at the end of a step",
        unit="minutes",
        above=0,
    )
    async_save: bool = option(
        False, "write checkpoints beside the training, which waits only while its tensors are copied"
    )
    exit_on_save_failure: bool = option(
        False,
        "end the training when a save beside it fails; a save that training waits for always does, and so does the last one",
    )
    no_save_optim: bool = option(False, "leave the optimizer out of checkpoints", off_flag="--save-optim")
    no_save_rng: bool = option(False, "leave random state out of checkpoints", off_flag="--save-rng")
    no_load_optim: bool = option(False, "start with a fresh optimizer", off_flag="--load-optim")
    no_load_rng: bool = option(False, "start with fresh random state", off_flag="--load-rng")
    finetune: bool = option(False, "take the weights alone from the checkpoint and start at step 0")
    ckpt_step: int | None = option(None, "step to load", unit="steps", at_least=0, derived="the latest")
    exit_on_missing_checkpoint: bool = option(
        False, "an error instead of a fresh start where --load holds no checkpoint"
    )
    use_checkpoint_args: bool = option(False, "take the model section from the checkpoint")
    keep_last: int | None = option(
        None,
        "newest checkpoints to keep; unset: all, or with --save-retain-interval the newest one",
        unit="checkpoints",
        at_least=1,
    )
    save_retain_interval: int | None = option(
        None,
        "checkpoints of steps divisible by this are kept for good, the others as --keep-last says",
        unit="steps",
        at_least=1,
    )
