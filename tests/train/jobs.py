"""Whole jobs for tests of the training loop.

`pretrain_gpt.py` runs with the flags of a tiny model, in this process or on the ranks of the harness.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megapipe.config.load import load_config
from megapipe.environment import RANKS_PER_GPU, read_environment
from megapipe.extras.cli.pretrain import main
from megapipe.extras.convert.snapshot import read_checkpoint
from megapipe.extras.report.observer import ReportingObserver
from megapipe.plan.resolve import resolve
from megapipe.train import run as run_module
from megapipe.train.run import Job, pretrain

TINY = (
    "--num-layers 4 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 4 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --mock-data --num-workers "
    "0 --eval-iters 0 "
    "--log-interval 1 --device cpu"
)


def job(flags: str, base: str | None = None) -> tuple[int, str]:
    """Run a job on one rank and return its exit code and its output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*(TINY if base is None else base).split(), *flags.split()])
    return code, said.getvalue()


def job_on_rank(
    rank: int, world_size: int, flags: str, prepare: Callable[..., None] | None = None, *arguments: Any
) -> tuple[str, str, str | None]:
    """Run a job on a rank of the harness and return its output, with type and text of its exception or None.

    prepare: called first on every rank.
    """
    run_module.shutdown = lambda code=0: None  # type: ignore[assignment]
    if prepare is not None:
        prepare(rank, *arguments)
    loaded = load_config([*TINY.split(), *flags.split()])
    plan = resolve(loaded.config, world_size)
    environment = dataclasses.replace(
        read_environment({}),
        global_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        ranks_per_gpu=int(os.environ.get(RANKS_PER_GPU, "1")),
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            pretrain(Job(plan, environment, loaded.text(plan.config), observer=ReportingObserver()))
        except Exception as error:
            return said.getvalue(), type(error).__name__, str(error)
    return said.getvalue(), "", None


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(path) if line["kind"] == "step"]


def furthest(first: Path, second: Path) -> float:
    """Return the largest difference of any master or moment element between the newest checkpoints of two runs."""
    one, other = read_checkpoint(first), read_checkpoint(second)
    assert one.step == other.step and one.tensors.keys() == other.tensors.keys()
    return max(
        float((tensor.detach() - other.tensors[name].detach()).abs().max()) for name, tensor in one.tensors.items()
    )
