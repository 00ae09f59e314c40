"""`megapipe inspect`: what a checkpoint holds, and what a step was trained on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megapipe.errors import CheckpointError, ConfigError, DataError
from megapipe.extras.cli.frame import command, option, switch
from megapipe.extras.cli.group import CommandGroup

main = CommandGroup(
    "megapipe inspect",
    {
        "checkpoint": ("inspect", "checkpoint", "step, grid, files and tensors; checksums; the difference of two"),
        "data": ("inspect", "data", "the documents of a step or a sample, and the steps that saw a document"),
    },
)
CHECKPOINT_OPTIONS = (
    option("path", "directory given to --save, or the folder of one step", type=Path, metavar="CHECKPOINT"),
    option("--step", "step to look at (default: the newest complete one)", type=int),
    switch("--tensors", "list every tensor; with --diff also the equal ones"),
    switch("--verify", "read all files and check all checksums", excludes="--diff"),
    option("--diff", "compare all tensors with those of this checkpoint", type=Path, metavar="OTHER"),
    switch("--json", "print one JSON object"),
)
DATA_OPTIONS = (
    option("--step", "samples and documents of this step, counted from 1", type=int),
    option("--sample", "documents of this sample, counted from 0, and the step and rank that take it", type=int),
    option("--document", "samples and steps that hold some of this document, counted from 0", type=int),
    option(
        "--in",
        "file prefix of --document, if there are several files",
        needs="--document",
        dest="prefix",
        metavar="PREFIX",
    ),
    option("--text", "show the first tokens of each piece, decoded", type=int, metavar="TOKENS"),
    switch("--json", "print one JSON object"),
)


@command("megapipe inspect checkpoint", CHECKPOINT_OPTIONS)
def checkpoint(own: argparse.Namespace) -> int:
    """Show what a checkpoint holds: step, grid, position, files and tensors; verify its checksums; compare it.

      megapipe inspect checkpoint checkpoints
      megapipe inspect checkpoint checkpoints --step 100 --tensors --verify
      megapipe inspect checkpoint checkpoints/step_00000100 --diff other/step_00000100

    Exit code: 0; 1 if --verify finds damage or --diff finds a tensor that differs (other differences are shown and do
    not count); 2 if a checkpoint cannot be read.
    """
    from megapipe.extras.inspect.checkpoint import chosen, show, show_difference

    try:
        folder = chosen(own.path, own.step)
        if own.diff is not None:
            return int(show_difference(folder, chosen(own.diff), own.tensors, own.json))
        return int(show(folder, own.tensors, own.verify, own.json))
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from None


@command("megapipe inspect data", DATA_OPTIONS, takes_config=True)
def data(own: argparse.Namespace) -> None:
    """Show which documents a step was trained on, and which steps saw a document.

      megapipe inspect data --step 1234 --world-size 8 --config run.yaml [flags of the run]
      megapipe inspect data --sample 5000 --text 80 --config run.yaml     one sample of the training data, by its index
      megapipe inspect data --document 17 --in data/web --config run.yaml

    Takes the flags of the run. --world-size gives the data-parallel ranks (by default one). Windows skipped by
    --spike-rollback and the position of each step are read from the newest checkpoint of --save, or else of --load.
    Does not import torch. Exit code 2 if the answer cannot be found.
    """
    from megapipe.extras.inspect.data import lines, of_document, of_sample, of_step, read_run, reader

    if sum(value is not None for value in (own.step, own.sample, own.document)) != 1:
        raise ConfigError("give one of --step, --sample and --document")
    try:
        run = read_run(own.flags)
        if own.step is not None:
            found = of_step(run, own.step)
        elif own.sample is not None:
            found = of_sample(run, own.sample)
        else:
            found = of_document(run, own.document, own.prefix)
        show = None if own.text is None else reader(run, own.text)
    except (CheckpointError, DataError) as error:
        raise ConfigError(str(error)) from None
    print(json.dumps(found) if own.json else "\n".join(lines(found, show)))
