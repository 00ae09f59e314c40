"""Ranks over NCCL, and where there is one, the same test over gloo on CPUs.

Order of messages over many channels, ZeRO-1 and overlapped reductions, a CUDA graph with collectives inside, a
collective that times out, a killed rank, a resumed run, and grids of every kind against one process. With fewer GPUs
than ranks, ranks share them (`megapipe launch --ranks-per-gpu`), so all of it runs on one GPU; the twin then sets the
same variables.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megapipe.schedule.families import SCHEDULES
from tests.cuda.ranks import TIMEOUT_SECONDS, sharing
from tests.cuda.test_training import EXACT, STEPS, WORDS, assert_close, losses, on_ranks
from tests.cuda.test_training import cpu_losses as cpu_losses  # a fixture
from tests.launch.scripts import launch

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("ranks.py")
NCCL = pytest.param("nccl", marks=pytest.mark.gpu)
both = pytest.mark.parametrize("backend", ["gloo", NCCL])
ENDS_WITHIN_SECONDS = 60.0


def over(backend: str) -> str:
    return f"--distributed-backend {backend} --device {'cuda' if backend == 'nccl' else 'cpu'}"


@both
def test_messages_over_ten_channels_keep_their_order_and_contents(backend: str, tmp_path: Path) -> None:
    with launch(tmp_path, 2, "order", backend, script=SCRIPT, before=sharing(2)) as command:
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
    with launch(tmp_path, 2, "time_out", backend, script=SCRIPT, before=sharing(2)) as command:
        ended = command.ended()
    assert ended.code != 0
    assert "has ended without rank 1" not in ended.error
    assert TIMEOUT_SECONDS <= time.monotonic() - began < ENDS_WITHIN_SECONDS
    if backend == "gloo":
        assert "no answer within the timeout of 5 s" in ended.error


@both
def test_a_killed_rank_ends_the_job_with_its_name(backend: str, tmp_path: Path) -> None:
    words = [*WORDS, *EXACT.split(), *over(backend).split(), *ZERO.split(), "--train-iters", "100000"]
    words += ["--metrics-file", str(tmp_path / "metrics.jsonl")]
    with launch(tmp_path, 2, *words, before=sharing(2)) as command:
        command.wait_for(f" {STEPS}/100000 |")
        began = time.monotonic()
        os.kill(command.ranks()[1], signal.SIGKILL)
        ended = command.ended()
    assert ended.code != 0 and time.monotonic() - began < ENDS_WITHIN_SECONDS
    assert "rank 1 was killed by SIGKILL" in ended.error
    assert len(losses(tmp_path)) >= STEPS


@both
def test_a_resumed_run_of_two_ranks_goes_on_with_the_losses_of_a_whole_one(backend: str, tmp_path: Path) -> None:
    flags = f"{over(backend)} {ZERO} --deterministic-mode --save-interval 2"
    whole = on_ranks(tmp_path, 2, flags)
    (folder := tmp_path / "parts").mkdir()
    for last in ("--exit-interval 2", ""):
        found = on_ranks(folder, 2, f"{flags} --save {folder} --load {folder} {last}")
    assert found == whole and len(found) == STEPS


TP, PP, DP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--global-batch-size 16"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
UNTIED = f"{PP} {DP2} --untie-embeddings-and-output-weights --clip-grad 0"  # as schedules without a barrier need
INTERLEAVED = f"{TP} --sequence-parallel {PP} {CHUNKS} {ZERO} {DP2}"
NO_BIAS = "--disable-bias-linear --position-embedding-type rope"
EXPERTS = f"{NO_BIAS} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
VERIFIED = {  # ranks, flags; --verify-grid states the bounds of each dtype
    "tp 2 x pp 2 x dp 2, interleaved, fp32": (8, INTERLEAVED),
    "tp 2 x pp 2 x dp 2, interleaved, bf16": (8, f"{INTERLEAVED} --bf16"),
    **{
        f"pp 2 x dp 2, {name}": (4, f"{UNTIED} --pipeline-schedule {name} {CHUNKS * (family.num_chunks(2) == 2)}")
        for name, family in SCHEDULES.items()
    },
    "dualpipe-v x ep 2, overlapped": (
        4,
        f"{PP} --pipeline-schedule dualpipe-v {EXPERTS} --overlap-moe-expert-parallel-comm {DP2}",
    ),
    "ep 2 x tp 2": (4, f"{EXPERTS} {TP} --sequence-parallel"),
    "cp 2 x dp 2, p2p": (4, "--context-parallel-size 2 --cp-comm-type p2p --overlap-grad-reduce"),
    "ZeRO-3 x tp 2": (4, f"--data-parallel-sharding-strategy optim_grads_params {TP} --sequence-parallel"),
}


def verify(name: str, backend: str, folder: Path) -> None:
    ranks, flags = VERIFIED[name]
    words = [*WORDS, *EXACT.split(), *over(backend).split(), *flags.split(), "--train-iters", "3"]
    mode = "fp64" if EXPERTS in flags else "native"  # in another dtype tokens choose other experts than in fp64
    with launch(folder, ranks, *words, "--verify-grid", mode, before=sharing(ranks)) as command:
        ended = command.ended()
    assert ended.code == 0, f"{ended.out[-3000:]}\n{ended.error}"
    assert f"on {ranks} rank(s)" in ended.out


@pytest.mark.parametrize("name", VERIFIED)
def test_a_grid_over_gloo_equals_one_process(name: str, tmp_path: Path) -> None:
    verify(name, "gloo", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VERIFIED)
def test_a_grid_over_nccl_equals_one_process(name: str, tmp_path: Path) -> None:
    verify(name, "nccl", tmp_path)
