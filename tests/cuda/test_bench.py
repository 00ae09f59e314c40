"""The GPU benchmark runs at a tiny size; its figures are not checked."""

from __future__ import annotations

import pytest
import torch

from megapipe.tensor_parallel.fp8 import fp8_unsupported_reason
from tests.tools.test_bench_gpu import TINY, bench

pytestmark = [pytest.mark.gpu, pytest.mark.compiles, pytest.mark.timeout(300)]  # a contender is a compiled model


def test_all_contenders_agree_and_are_timed() -> None:
    fp8 = ["megapipe-fp8"] if fp8_unsupported_reason(torch.device("cuda")) is None else []
    words = (
        "--device",
        "cuda",
        "--dtype",
        "bf16",
        "--kernels",
        "--contenders",
        "megapipe",
        *fp8,
        "plain",
        "transformers",
    )
    done = bench(*TINY, *words)
    assert done.returncode == 0, done.stderr
    assert "megapipe, peak memory: planned" in done.stdout and "| GEMM |" in done.stdout
    assert "fp8 GEMM to GEMM" in done.stdout or not fp8
