"""The checkpoint section: saving and loading of the training state."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.option import Flag, Need, option

SAVE = Need("checkpoint.save", "--save DIR")
LOAD = Need("checkpoint.load", "--load DIR")


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, which are kept, and what is loaded from one."""

    save: str | None = option(None, "directory to save checkpoints in")
    load: str | None = option(None, "directory to load a checkpoint from")
    save_interval: int | None = option(
        None,
        "steps between checkpoints; unset: only at the end",
        unit="steps",
        at_least=1,
        needs=SAVE,
        more_flags=(Flag("--persistent-save-interval", help="same as --save-interval"),),
    )
    save_interval_minutes: float | None = option(
        None,
        "time between checkpoints, alone or together with --save-interval; saved at the end of a step",
        unit="minutes",
        above=0,
        needs=SAVE,
    )
    async_save: bool = option(
        False,
        "write checkpoints in the background; training waits only while its tensors are copied",
        needs=SAVE,
    )
    exit_on_save_failure: bool = option(
        False,
        "end the run when a background save fails (a save that training waits for, and the last save, always do)",
        needs=SAVE,
    )
    no_save_optim: bool = option(False, "leave the optimizer out of checkpoints", off_flag="--save-optim")
    no_save_rng: bool = option(False, "leave random state out of checkpoints", off_flag="--save-rng")
    no_load_optim: bool = option(False, "start with a fresh optimizer", off_flag="--load-optim")
    no_load_rng: bool = option(False, "start with fresh random state", off_flag="--load-rng")
    finetune: bool = option(False, "load only the weights and start at step 0", needs=LOAD)
    ckpt_step: int | None = option(None, "step to load", unit="steps", at_least=0, derived="the latest", needs=LOAD)
    exit_on_missing_checkpoint: bool = option(
        False, "fail instead of starting from scratch if --load contains no checkpoint", needs=LOAD
    )
    use_checkpoint_args: bool = option(False, "take the model section from the checkpoint", needs=LOAD)
    keep_last: int | None = option(
        None,
        "newest checkpoints to keep; unset: all, or with --save-retain-interval the newest one",
        unit="checkpoints",
        at_least=1,
        needs=SAVE,
    )
    save_retain_interval: int | None = option(
        None,
        "keep the checkpoints of steps divisible by this forever; --keep-last applies to the others",
        unit="steps",
        at_least=1,
        needs=SAVE,
    )
