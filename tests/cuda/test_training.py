"""Whole jobs on a GPU against the same jobs on the CPU: one rank, ranks that share the GPU over host memory, resumed
runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megapipe.train.step import TrainStep
from tests.cuda.ranks import sharing
from tests.launch.scripts import launch
from tests.train.jobs import TINY, job, lines_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CARD = "cuda"
# a GPU draws other masks than a CPU, and tensor-parallel ranks others than one rank
EXACT = "--hidden-dropout 0 --attention-dropout 0"
SHARED = f"--device {CARD} --distributed-backend gloo"  # ranks share the GPU
WORDS = [word for word in TINY.split() if word not in ("--device", "cpu")]
STEPS = 5
TOLERANCE = 1e-4  # fp32 without TF32


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines_of(folder / "metrics.jsonl") if line.get("kind") == "step"]


def on_one(folder: Path, flags: str, device: str) -> list[float]:
    code, said = job(f"--train-iters {STEPS} {EXACT} --device {device} --metrics-file {folder}/metrics.jsonl {flags}")
    assert code == 0, said
    return losses(folder)


def on_ranks(folder: Path, ranks: int, flags: str) -> list[float]:
    words = [
        *WORDS,
        *EXACT.split(),
        *flags.split(),
        "--train-iters",
        str(STEPS),
        "--metrics-file",
        str(folder / "metrics.jsonl"),
    ]
    with launch(folder, ranks, *words, before=[] if SHARED in flags else sharing(ranks)) as command:
        ended = command.ended()
    assert ended.code == 0, ended.error
    return losses(folder)


@pytest.fixture(scope="module")
def cpu_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of the plain job on one rank of the CPU."""
    found = on_one(tmp_path_factory.mktemp("cpu"), "", "cpu")
    assert len(found) == STEPS
    return found


def assert_close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="plain"),
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", id="full recompute"
        ),
        pytest.param("--pipeline-model-parallel-layout Et|tt|tL", id="three stages on a rank"),
        pytest.param("--optimizer-cpu-offload", id="optimizer on the host"),
        pytest.param(
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", id="distributed optimizer"
        ),
    ],
)
def test_a_gpu_trains_like_a_cpu(flags: str, cpu_losses: list[float], tmp_path: Path) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    assert_close(on_one(tmp_path, flags, CARD), cpu_losses)


def test_a_llama_on_a_gpu_trains_like_on_a_cpu(tmp_path: Path) -> None:
    flags = (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2"
    )
    assert_close(on_one(tmp_path / "card", flags, CARD), on_one(tmp_path / "cpu", flags, "cpu"))


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OFFLOAD = "--cpu-offloading-num-layers 4 --min-offloaded-tensor-size 1"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(f"{FULL} --recompute-keep-attention", id="attention kept through full recompute"),
        pytest.param(OFFLOAD, id="offloaded"),
        pytest.param(f"{OFFLOAD} {FULL}", id="checkpoints offloaded"),
        pytest.param(f"{OFFLOAD} --pipeline-model-parallel-layout Et|tt|tL", id="three stages offloaded"),
    ],
)
def test_recompute_and_offload_do_not_change_a_bit(flags: str, tmp_path: Path) -> None:
    plain = on_one(tmp_path / "plain", "--deterministic-mode", CARD)
    assert on_one(tmp_path / "other", f"--deterministic-mode {flags}", CARD) == plain


GRIDS = {
    "pp 2, zero bubble, offloaded": (2, f"--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 {OFFLOAD}"),
    "pp 2, dualpipe, offloaded": (2, f"--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe {OFFLOAD}"),
    "tp 2, sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp 2, sequence parallel, in chunks": (2, "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "pp 2, zero bubble": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "pp 2, dualpipe: pairs on two streams": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe"),
    "dp 2, ZeRO-1": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tp 2 x pp 2, dualpipe-v": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_ranks_that_share_a_gpu_train_like_one_cpu(name: str, cpu_losses: list[float], tmp_path: Path) -> None:
    ranks, flags = GRIDS[name]
    assert_close(on_ranks(tmp_path, ranks, f"{SHARED} {flags}"), cpu_losses)


@pytest.mark.parametrize("flags", ["", "--sequence-parallel", "--sequence-parallel --tp-comm-overlap-chunks 2"])
def test_collectives_in_chunks_over_nccl_train_like_one_cpu(
    flags: str, cpu_losses: list[float], tmp_path: Path
) -> None:
    overlapped = f"--device {CARD} --distributed-backend nccl --tensor-model-parallel-size 2 --tp-comm-overlap {flags}"
    assert_close(on_ranks(tmp_path, 2, overlapped), cpu_losses)


def test_bf16_follows_fp32(cpu_losses: list[float], tmp_path: Path) -> None:
    found = on_one(tmp_path, "--bf16", CARD)
    assert found == pytest.approx(cpu_losses, rel=0.02)
    assert found != cpu_losses


def test_a_resumed_run_on_a_gpu_is_bit_exact(tmp_path: Path) -> None:
    flags = (
        f"--device {CARD} --bf16 --deterministic-mode --hidden-dropout 0.1 --attention-dropout 0.1 --save-interval 3"
    )
    for name, parts in {"whole": (6,), "parts": (3, 6)}.items():
        for until in parts:
            code, said = job(
                f"{flags} --train-iters 6 --exit-interval {until} --save {tmp_path / name} --load "
                f"{tmp_path / name} --async-save"
            )
            assert code == 0, said
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize("flags", ["", OFFLOAD, f"{FULL} --recompute-keep-attention --attention-dropout 0"])
def test_nothing_in_a_launched_step_waits_for_the_device(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, calls = TrainStep.gradients, []

    def strict(self: TrainStep, *arguments: object) -> object:
        calls.append(1)
        if len(calls) > 1:  # the first compiles and allocates
            torch.cuda.set_sync_debug_mode("error")
        try:
            return start(self, *arguments)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainStep, "gradients", strict)
    code, said = job(
        f"--device {CARD} --bf16 --train-iters {STEPS} --hidden-dropout 0.1 --use-distributed-optimizer {flags}"
    )
    assert code == 0, said
    assert len(calls) == STEPS


def test_memory_snapshot_and_ranges_of_nsight(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    code, said = job(
        f"--device {CARD} --train-iters 2 --nvtx-ranges --record-memory-history --memory-snapshot-path {path}"
    )
    assert code == 0, said
    assert (tmp_path / "memory_rank_00000.pickle").stat().st_size > 1000


def test_a_model_that_does_not_fit_reports_the_planned_bytes(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2e9 / total))
    try:
        code, said = job(
            f"--device {CARD} --train-iters 1 --hidden-size 4096 --ffn-hidden-size 16384 --save {tmp_path}"
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert code == 1
    assert "ran out of memory: planned" in said and "Ways out:" in said and "of the GPU's" in said
    assert any(
        "ran out" in json.loads(line).get("text", "") for line in (tmp_path / "run.jsonl").read_text().splitlines()
    )
