"""Every feature trains a few steps on GPUs like one process in fp32 on the CPU, and so does its twin on CPUs.

The twin is the same case over gloo, so no case runs on a GPU for the first time. With fewer GPUs than ranks, ranks
share them (`on_ranks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megapipe.tensor_parallel.fp8 import fp8_unsupported_reason
from tests.cuda.test_training import STEPS, TOLERANCE, on_one, on_ranks

pytestmark = pytest.mark.timeout(300)

# sizes that all kernels take: heads of 16 channels, GEMMs of multiples of 16
SIZES = (
    "--hidden-size 64 --ffn-hidden-size 64 --seq-length 32 --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --lr 1e-3"
)
HALF, EIGHT_BITS = 0.01, 0.02  # largest relative differences of a loss in bf16 and in fp8 from fp32


@dataclass(frozen=True)
class Case:
    """model: flags of the function, which the reference has too; layout: how it is computed, on how many ranks."""

    model: str = ""
    layout: str = ""
    ranks: int = 1
    tolerance: float = TOLERANCE


EXPERTS = "--num-experts 4 --moe-router-topk 2"
PADDED = f"{EXPERTS} --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity"
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 16"
)
SHARDED = "--data-parallel-sharding-strategy"
ZERO3 = f"{SHARDED} optim_grads_params"
CP = "--context-parallel-size"
CASES = {  # one GPU first
    "loss and optimizer compiled": Case("", "--bf16 --compile-loss --optimizer-impl compiled", 1, HALF),
    "blocks compiled": Case("", "--bf16 --compile-blocks on", 1, HALF),
    "experts, dropless": Case(EXPERTS),
    "experts, padded": Case(PADDED),
    "experts, grouped GEMM": Case(EXPERTS, "--moe-grouped-gemm"),
    "experts, grouped GEMM in bf16": Case(EXPERTS, "--moe-grouped-gemm --bf16", 1, HALF),
    "latent attention": Case(LATENT),
    "multi-token prediction": Case("--mtp-num-layers 1"),
    "slices": Case("", "--pipe-sp-splits 2"),
    "slices of experts and latent attention, loss compiled": Case(
        f"{EXPERTS} {LATENT}", "--pipe-sp-splits 2 --bf16 --compile-loss", 1, HALF
    ),
    "Muon": Case("--optimizer muon"),
    "fp8, blockwise": Case("", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", 1, EIGHT_BITS),
    "fp8, mxfp8": Case("", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", 1, EIGHT_BITS),
    "ZeRO-2": Case("", f"{SHARDED} optim_grads --overlap-grad-reduce", 2),
    "ZeRO-3": Case("", ZERO3, 2),
    "ZeRO-3, units of layers": Case("", f"{ZERO3} --data-parallel-sharding-units 2", 2),
    "ZeRO-3, compiled update in bf16": Case("", f"{ZERO3} --bf16 --compile-loss --optimizer-impl compiled", 2, HALF),
    "HSDP": Case("", f"{ZERO3} --num-distributed-optimizer-instances 2", 4),
    "experts, ep 2": Case(EXPERTS, "--expert-model-parallel-size 2", 2),
    "experts, ep 2, padded": Case(PADDED, "--expert-model-parallel-size 2", 2),
    "cp 2, p2p": Case("", f"{CP} 2 --cp-comm-type p2p", 2),
    "cp 2, p2p, bf16": Case("", f"{CP} 2 --cp-comm-type p2p --bf16 --compile-loss", 2, HALF),
    "cp 2, a2a": Case("", f"{CP} 2 --cp-comm-type a2a", 2),
    "cp 2, all_gather": Case("", f"{CP} 2 --cp-comm-type all_gather", 2),
    "cp 4, a2a+p2p": Case("", f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4),
    "slices, pp 2": Case("", "--pipe-sp-splits 2 --pipeline-model-parallel-size 2", 2),
    "Muon, tp 2": Case("--optimizer muon", "--muon-tp-mode duplicated --tensor-model-parallel-size 2", 2),
}


def on_gpu(name: str) -> object:
    """Return a case with its marks: fp8 needs a GPU that multiplies its format."""
    ranks, recipe = CASES[name].ranks, CASES[name].layout.partition("--fp8-recipe ")[2]
    lacking = fp8_unsupported_reason(torch.device("cuda"), recipe) if recipe and torch.cuda.is_available() else None
    no_fp8 = pytest.mark.skipif(lacking is not None, reason=str(lacking))
    compiles = [pytest.mark.compiles] if "compile" in CASES[name].layout else []
    return pytest.param(name, marks=[pytest.mark.gpu, no_fp8, *compiles], id=f"gpus{ranks} {name}")


@pytest.fixture(scope="module")
def references() -> dict[str, list[float]]:
    """Return the losses of one process in fp32 on the CPU by the flags of the model; tests add what they need."""
    return {}


def check(name: str, device: str, references: dict[str, list[float]], folder: Path) -> None:
    case = CASES[name]
    if case.model not in references:
        (folder / "reference").mkdir()
        references[case.model] = on_one(folder / "reference", f"{SIZES} {case.model}", "cpu")
    flags = f"{SIZES} {case.model} {case.layout}"
    if case.ranks == 1:
        found = on_one(folder, flags, device)
    else:
        backend = "nccl" if device == "cuda" else "gloo"
        found = on_ranks(folder, case.ranks, f"--device {device} --distributed-backend {backend} {flags}")
    expected = references[case.model]
    assert len(found) == STEPS and found == pytest.approx(expected, rel=case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_a_feature_trains_on_cpus_like_one_process_in_fp32(
    name: str, references: dict[str, list[float]], tmp_path: Path
) -> None:
    check(name, "cpu", references, tmp_path)


@pytest.mark.parametrize("name", [on_gpu(name) for name in CASES])
def test_a_feature_trains_on_gpus_like_one_process_in_fp32(
    name: str, references: dict[str, list[float]], tmp_path: Path
) -> None:
    check(name, "cuda", references, tmp_path)
