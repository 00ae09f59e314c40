"""The benchmark of sharding compares the strategies' losses and prints a row for each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench" / "bench_sharding.py"


def test_the_strategies_agree_and_are_timed_in_turn() -> None:
    sizes = "--num-layers 4 --hidden-size 64 --seq-length 16 --microbatches 2 --repeats 1 --granularity run step"
    run = subprocess.run(
        [sys.executable, TOOL, *sizes.split()], capture_output=True, text=True, timeout=280, check=True
    )
    rows = run.stdout.splitlines()[3:]
    names = [row[:32].strip() for row in rows]
    sharded = [f"{strategy} {each}" for strategy in ("optim_grads", "optim_grads_params") for each in ("run", "step")]
    assert names == ["no_shard", "optim", *sharded]
    # two microbatches: gradients are reduced twice, or once a step; weights are gathered for each or once
    sent = [float(row[32:].split()[4]) for row in rows]
    assert sent[2] > 1.2 * sent[1]
    assert sent[3] == sent[5] == pytest.approx(sent[1], abs=0.11)
    assert sent[4] > 1.2 * sent[2]
