"""The benchmark runs on a card at a tiny size; its figures are not looked at."""

from __future__ import annotations

import pytest

from tests.tools.test_bench_gpu import TINY, bench

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_all_contenders_agree_and_are_timed() -> None:
    done = bench(*TINY, "--device", "cuda", "--dtype", "bf16", "--kernels")
    assert done.returncode == 0, done.stderr
    assert "peak memory: planned" in done.stdout and "| GEMM |" in done.stdout
