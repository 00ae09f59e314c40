"""`megapipe progress`: the step that a run has reached, from its newest complete checkpoint, for job scripts.

Needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megapipe.checkpoint.folder import find_checkpoint
from megapipe.config.load import load_config
from megapipe.errors import CheckpointError, ConfigError, MegapipeError
from megapipe.extras.cli.pretrain import with_vocabulary
from megapipe.plan.resolve import resolve

HELP = """\
usage: megapipe progress --world-size N [--ranks-per-node M] [flags of pretrain_gpt.py]

  megapipe progress --world-size 8 --config configs/quickstart.yaml --save runs/one
  step 40 of 100, runs/one/step_00000040

Prints the step of the newest complete checkpoint in --save, and the last step of the run on this many ranks; exits with
2 and an error message if the run is impossible. Starts nothing and writes nothing.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the line and return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if arguments else 2
    try:
        print(progress_line(arguments))
    except MegapipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def progress_line(arguments: Sequence[str]) -> str:
    """Return 'step 40 of 100, ...'. Raises ConfigError for everything that training would refuse too."""
    loaded = load_config(["--plan", *arguments])
    if loaded.requests.world_size is None:
        raise ConfigError("megapipe progress needs --world-size N, the number of ranks of the run")
    plan = resolve(with_vocabulary(loaded.config), loaded.requests.world_size, loaded.requests.ranks_per_node)
    total, save = plan.config.training.train_iters, plan.config.checkpoint.save
    if not total:
        raise ConfigError("the run has no last step: give --train-iters or --train-samples")
    if save is None:
        return f"step 0 of {total}, nothing is saved without --save"
    try:
        found = find_checkpoint(Path(save))
    except CheckpointError as error:  # only damaged checkpoints: no progress; training reports what to do about them
        return f"step 0 of {total}, " + str(error).replace("\n", " ")
    return (
        f"step 0 of {total}, no checkpoint in {save} yet"
        if found is None
        else f"step {found.step} of {total}, {found.path}"
    )
