"""Two ranks over NCCL, a GPU each, and where there is one, the same test over gloo on CPUs.

Order of messages over many channels, ZeRO-1 and overlapped reductions, a CUDA graph with collectives inside, a
collective that times out, a killed rank.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.cuda.ranks import TIMEOUT_SECONDS
from tests.cuda.test_training import EXACT, STEPS, WORDS, assert_close, losses, on_ranks
from tests.cuda.test_training import cpu_losses as cpu_losses  # a fixture
from tests.launch.scripts import launch

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("ranks.py")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
NCCL = pytest.param("nccl", marks=[pytest.mark.gpu, needs_two])
both = pytest.mark.parametrize("backend", ["gloo", NCCL])
ENDS_WITHIN_SECONDS = 60.0


def over(backend: str) -> str:
    return f"--distributed-backend {backend} --device {'cuda' if backend == 'nccl' else 'cpu'}"


@both
def test_messages_over_ten_channels_keep_their_order_and_contents(backend: str, tmp_path: Path) -> None:
    with launch(tmp_path, 2, "order", backend, script=SCRIPT) as command:
        ended = command.ended()
    assert ended.code == 0, ended.error
    assert ended.out.count("20 messages received over 10 channels") == 2


ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 700"
GRIDS = {
    "dp 2, reductions overlapped": "--overlap-grad-reduce --ddp-bucket-size 700",
    "dp 2, ZeRO-1 in many buckets": ZERO,
    "pp 2, 2 chunks": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
}


@both
@pytest.mark.parametrize("name", GRIDS)
def test_two_ranks_train_like_one(name: str, backend: str, cpu_losses: list[float], tmp_path: Path) -> None:
    assert_close(on_ranks(tmp_path, 2, f"{over(backend)} {GRIDS[name]}"), cpu_losses)


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("flags", ["", "--sequence-parallel"])
def test_graphs_with_collectives_of_nccl_inside_replay_the_launched_losses(flags: str, tmp_path: Path) -> None:
    flags = f"{over('nccl')} --tensor-model-parallel-size 2 {flags}"
    launched = on_ranks(tmp_path, 2, flags)
    (tmp_path / "graphs").mkdir()
    graphs = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
    assert_close(on_ranks(tmp_path / "graphs", 2, f"{flags} {graphs}"), launched)


@both
def test_a_collective_without_its_peer_ends_the_job_in_time(backend: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with launch(tmp_path, 2, "time_out", backend, script=SCRIPT) as command:
        ended = command.ended()
    assert ended.code != 0
    assert "has ended without rank 1" not in ended.error
    assert TIMEOUT_SECONDS <= time.monotonic() - began < ENDS_WITHIN_SECONDS
    if backend == "gloo":
        assert "no answer within the timeout of 5 s" in ended.error


@both
def test_a_killed_rank_ends_the_job_with_its_name(backend: str, tmp_path: Path) -> None:
    words = [*WORDS, *EXACT.split(), *over(backend).split(), *ZERO.split(), "--train-iters", "100000"]
    with launch(tmp_path, 2, *words, "--metrics-file", str(tmp_path / "metrics.jsonl")) as command:
        command.wait_for(f" {STEPS}/100000 |")
        began = time.monotonic()
        os.kill(command.ranks()[1], signal.SIGKILL)
        ended = command.ended()
    assert ended.code != 0 and time.monotonic() - began < ENDS_WITHIN_SECONDS
    assert "rank 1 was killed by SIGKILL" in ended.error
    assert len(losses(tmp_path)) >= STEPS
