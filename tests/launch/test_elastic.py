"""`megapipe launch --nnodes 1:2`: after one node is lost, training continues on the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapipe.extras.launch.torchrun import free_port
from tests.launch.scripts import launch
from tests.tiny import TINY_FLAGS
from tests.train.jobs import furthest, steps_of

SLOW_STEPS = """
import sys, time
from megapipe.extras.cli.pretrain import main
from megapipe.train.step import TrainStep

launch = TrainStep.run


def one_step(self, *arguments):
    time.sleep(0.3)
    return launch(self, *arguments)


TrainStep.run = one_step
sys.exit(main())
"""
FLAGS = (
    *TINY_FLAGS,
    "--mock-data",
    "--fp64",
    "--adam-eps",
    "1e-4",
    "--global-batch-size",
    "4",
    "--train-iters",
    "16",
    "--save-interval",
    "2",
)
# the first round waits for the second node, also on a busy machine: if it comes later, torch starts all ranks again
SOON = "last_call_timeout=10,keep_alive_interval=1,join_timeout=60"


@pytest.mark.slow
def test_the_remaining_node_continues_with_half_the_replicas(tmp_path: Path) -> None:
    script, run, port = tmp_path / "script.py", tmp_path / "run", free_port()
    script.write_text(SLOW_STEPS)
    folders = [tmp_path / name for name in ("node1", "node2", "alone")]
    for folder in folders:
        folder.mkdir()
    meeting = (
        "--nnodes",
        "1:2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "elastic",
    )
    befores = []
    for node in (1, 2):
        # the node that stays holds the store of the rendezvous, whichever of the two starts faster
        conf = f"{SOON},is_host={int(node == 1)}"
        befores.append((*meeting, "--rdzv-conf", conf, "--max-restarts", "3", "--local-addr", f"127.0.0.{node}"))
    flags = (*FLAGS, "--save", str(run))
    with launch(folders[0], 1, *flags, script=script, before=befores[0]) as kept:
        with launch(folders[1], 1, *flags, script=script, before=befores[1]):
            kept.wait_for("step  5/")
        ended = kept.ended()  # leaving the context killed the launcher and the rank of the other node
    assert ended.code == 0, ended.error
    assert "restart 1 of at most 3" in ended.error and "a restart: continuing from --save" in ended.out
    assert " dp 2" in ended.out and ended.out.count("plan: 1 rank") == 1
    with launch(folders[2], 1, *FLAGS, "--save", str(tmp_path / "straight")) as command:
        assert command.ended().code == 0
    assert furthest(run, tmp_path / "straight") <= 1e-12
    # the latest record of a repeated step
    last = {line["step"]: line["loss"] for line in steps_of(run / "metrics.jsonl")}
    undisturbed = {line["step"]: line["loss"] for line in steps_of(tmp_path / "straight" / "metrics.jsonl")}
    assert last == pytest.approx(undisturbed, rel=0, abs=1e-12)
